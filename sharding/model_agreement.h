// Whether all ranks are about to shard the same model alike; else nothing that follows would agree.
#pragma once

#include <string>
#include <vector>

#include <torch/nn/module.h>

#include <fsdp/communicator.h>

#include "sharding/strategy.h"
#include "sharding/unit_cut.h"

namespace fsdp {

// One line for the options of the whole, for each unit, parameter and buffer, in the order that fsdp::shard takes them.
std::vector<std::string> describe_model(const torch::nn::Module& module, const std::vector<CutUnit>& units,
                                        const std::vector<UnitPolicy>& policies, const ShardOptions& options);

// Collective. Throws InvalidArgument on every rank where a rank's lines are not those of rank 0, with the first pair
// that differs.
void check_same_model(Communicator& communicator, const std::vector<std::string>& lines);

}  // namespace fsdp
