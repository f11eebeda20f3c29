// The states of a unit's parameters and of a round of its gradients, with the legal moves. An illegal move throws.
//
//   parameters:  Sharded -> Gathering -> Resident -> Sharded
//   gradients:   Empty -> Filling -> Reducing -> Reduced;  Empty -> Reducing where this rank has none
#pragma once

#include <string_view>

namespace fsdp {

enum class ParameterState {
  kSharded,    // only the shards exist; reading the unit throws
  kGathering,  // a gather has been issued
  kResident,   // the unit's storages point at a slot
};

enum class GradientState {
  kEmpty,     // nothing has come
  kFilling,   // some gradients have come
  kReducing,  // published; peers may read the buffer
  kReduced,   // this rank's gradient shard holds the sum
};

std::string_view name_of(ParameterState state);
std::string_view name_of(GradientState state);

// Sets `state` to `next`. Throws std::logic_error (a fault of the engine, not of its caller) naming the unit and both
// states where the table above has no such arrow.
void move_to(ParameterState& state, ParameterState next, std::string_view unit);
void move_to(GradientState& state, GradientState next, std::string_view unit);

}  // namespace fsdp
