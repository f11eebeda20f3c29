#include "sharding/unit_state.h"

#include <stdexcept>

#include <fmt/format.h>

namespace fsdp {
namespace {

bool is_legal(ParameterState from, ParameterState to) {
  switch (from) {
    case ParameterState::kSharded: return to == ParameterState::kGathering;
    case ParameterState::kGathering: return to == ParameterState::kResident;
    case ParameterState::kResident: return to == ParameterState::kSharded;
  }
  return false;
}

bool is_legal(GradientState from, GradientState to) {
  switch (from) {
    case GradientState::kEmpty: return to == GradientState::kFilling || to == GradientState::kReducing;
    case GradientState::kFilling: return to == GradientState::kReducing;
    case GradientState::kReducing: return to == GradientState::kReduced;
    case GradientState::kReduced: return false;
  }
  return false;
}

template <class State>
void checked_move(State& state, State next, std::string_view unit, std::string_view what) {
  if (!is_legal(state, next)) {
    throw std::logic_error(
        fmt::format("unit {}: {} cannot go from {} to {}; this is a fault of the engine, please report it", unit, what,
                    name_of(state), name_of(next)));
  }
  state = next;
}

}  // namespace

std::string_view name_of(ParameterState state) {
  switch (state) {
    case ParameterState::kSharded: return "Sharded";
    case ParameterState::kGathering: return "Gathering";
    case ParameterState::kResident: return "Resident";
  }
  return "";
}

std::string_view name_of(GradientState state) {
  switch (state) {
    case GradientState::kEmpty: return "Empty";
    case GradientState::kFilling: return "Filling";
    case GradientState::kReducing: return "Reducing";
    case GradientState::kReduced: return "Reduced";
  }
  return "";
}

void move_to(ParameterState& state, ParameterState next, std::string_view unit) {
  checked_move(state, next, unit, "parameters");
}
void move_to(GradientState& state, GradientState next, std::string_view unit) {
  checked_move(state, next, unit, "gradients");
}

}  // namespace fsdp
