#include "sharding/unit_cut.h"

#include <algorithm>
#include <map>
#include <set>
#include <unordered_map>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <fsdp/error.h>

namespace fsdp {

Units units_by_size(std::size_t bytes) {
  if (bytes == 0) throw InvalidArgument("units_by_size: expected at least 1 byte, got 0");
  Units units;
  units.max_bytes = bytes;
  return units;
}

Units units_if(std::function<bool(const std::string&, const torch::nn::Module&)> predicate) {
  if (!predicate) throw InvalidArgument("units_if: expected a predicate, got an empty function");
  Units units;
  units.predicate = std::move(predicate);
  return units;
}

Units units_named(std::vector<std::string> names) {
  if (names.empty()) throw InvalidArgument("units_named: expected at least one module name, got none");
  Units units;
  units.names = std::move(names);
  return units;
}

namespace {

using ModulePointer = std::shared_ptr<torch::nn::Module>;
constexpr const char* kRoot = "(root)";

std::vector<std::pair<std::string, ModulePointer>> submodules(const torch::nn::Module& module) {
  std::vector<std::pair<std::string, ModulePointer>> result;
  for (const auto& item : module.named_modules(std::string(), /*include_self=*/false))
    result.emplace_back(item.key(), item.value());
  return result;
}

std::size_t parameter_bytes(const torch::nn::Module& module) {
  std::set<const void*> seen;
  std::size_t bytes = 0;
  for (const at::Tensor& parameter : module.parameters()) {
    if (seen.insert(parameter.unsafeGetTensorImpl()).second) bytes += parameter.nbytes();
  }
  return bytes;
}

void select_by_size(const torch::nn::Module& module, const std::string& prefix, std::size_t max_bytes,
                    std::set<std::string>& selected) {
  for (const auto& child : module.named_children()) {
    const std::string name = prefix + child.key();
    if (parameter_bytes(*child.value()) <= max_bytes) {
      selected.insert(name);
    } else {
      select_by_size(*child.value(), name + ".", max_bytes, selected);
    }
  }
}

std::set<std::string> select_units(const torch::nn::Module& module, const Units& units) {
  std::set<std::string> selected;
  const auto candidates = submodules(module);
  if (units.predicate) {
    std::set<std::string> types;
    for (const auto& [name, submodule] : candidates) {
      if (units.predicate(name, *submodule)) selected.insert(name);
      types.insert(submodule->name());
    }
    if (selected.empty()) {
      throw InvalidArgument(
          fmt::format("fsdp::shard: units match no sub-module of {}; it holds {}; name one of these types or leave "
                      "units out to cut by size",
                      module.name(), types.empty() ? "none" : fmt::format("{}", fmt::join(types, ", "))));
    }
  } else if (!units.names.empty()) {
    for (const std::string& wanted : units.names) {
      const bool known = std::any_of(candidates.begin(), candidates.end(),
                                     [&](const auto& item) { return item.first == wanted; });
      if (!known) {
        std::vector<std::string> names;
        for (const auto& item : candidates) names.push_back(item.first);
        throw InvalidArgument(fmt::format("fsdp::shard: unit {} is no sub-module of {}; it has {}", wanted,
                                          module.name(), fmt::join(names, ", ")));
      }
      selected.insert(wanted);
    }
  } else {
    select_by_size(module, "", units.max_bytes, selected);
  }
  return selected;
}

// The innermost selected module that a parameter's name lies in: of "layers.0.mlp.weight" it tries layers.0.mlp,
// layers.0, layers.
std::string unit_of(std::string parameter_name, const std::set<std::string>& selected) {
  for (auto dot = parameter_name.rfind('.'); dot != std::string::npos; dot = parameter_name.rfind('.')) {
    parameter_name.resize(dot);
    if (selected.count(parameter_name) > 0) return parameter_name;
  }
  return kRoot;
}

// named_parameters() lists a tensor that a shared module or a tie registers twice under both names.
std::vector<NamedParameter> distinct_parameters(const torch::nn::Module& module) {
  std::vector<NamedParameter> parameters;
  std::unordered_map<const void*, std::size_t> index;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (!tensor.defined()) return;
    const auto [found, is_new] = index.emplace(tensor.unsafeGetTensorImpl(), parameters.size());
    if (is_new) {
      parameters.push_back({name, {}, tensor});
    } else {
      parameters[found->second].tied_names.push_back(name);
    }
  };
  for (const auto& item : module.named_parameters(/*recurse=*/true)) add(item.key(), item.value());
  return parameters;
}

}  // namespace

std::vector<CutUnit> cut_units(const torch::nn::Module& module, const Units& units) {
  const std::set<std::string> selected = select_units(module, units);
  std::vector<CutUnit> result;
  std::map<std::string, std::size_t> index;
  for (NamedParameter& parameter : distinct_parameters(module)) {
    const std::string name = unit_of(parameter.name, selected);
    const auto [found, is_new] = index.emplace(name, result.size());
    if (is_new) result.push_back({name, {}});
    result[found->second].parameters.push_back(std::move(parameter));
  }
  if (result.empty())
    throw InvalidArgument(fmt::format("fsdp::shard: {} has no parameter; nothing to shard", module.name()));
  return result;
}

}  // namespace fsdp
