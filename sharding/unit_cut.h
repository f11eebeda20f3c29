// Cuts a module's parameters into units.
#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/options.h>

namespace fsdp {

struct NamedParameter {
  std::string name;                     // first of its names in named_parameters() order
  std::vector<std::string> tied_names;  // its other names
  at::Tensor tensor;
};

struct CutUnit {
  std::string name;  // dotted; "(root)" for the parameters of no unit
  std::vector<NamedParameter> parameters;
};

// Each parameter tensor is in exactly one unit: the innermost one that its first name lies in. Units without
// parameters are left out. Throws InvalidArgument where nothing matches, a name is unknown, or the module has no
// parameter.
std::vector<CutUnit> cut_units(const torch::nn::Module& module, const Units& units);

}  // namespace fsdp
