// Whether all ranks are about to shard the same model alike, and to update it alike; else nothing that follows would
// agree.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <torch/nn/module.h>

#include <fsdp/communicator.h>

#include "sharding/strategy.h"
#include "sharding/unit_cut.h"

namespace fsdp {

// One line for the options of the whole, for each unit, parameter and buffer, in the order that fsdp::shard takes them.
std::vector<std::string> describe_model(const torch::nn::Module& module, const std::vector<CutUnit>& units,
                                        const std::vector<UnitPolicy>& policies, const ShardOptions& options);

// Collective. Throws InvalidArgument on every rank where what a rank describes is not what rank 0 does, with the first
// pair of lines that differs: "`call`: rank 1 has `what` than rank 0: ...". An InvalidArgument of `describe` is a line
// too: where all ranks have the same, each throws its own.
void check_same(Communicator& communicator, std::string_view call, std::string_view what,
                const std::function<std::vector<std::string>()>& describe);

}  // namespace fsdp
