#include "sharding/unit_state.h"

#include <array>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace fsdp {
namespace {

template <class State>
std::string refusal(State from, State to) {
  try {
    State state = from;
    move_to(state, to, "layers.3");
    EXPECT_EQ(state, to);
    return "";
  } catch (const std::logic_error& error) {
    return error.what();
  }
}

TEST(UnitStateTest, AllowsTheArrowsOfItsTableAndNoOthers) {
  using P = ParameterState;
  constexpr std::array<P, 3> kParameters{P::kSharded, P::kGathering, P::kResident};
  for (std::size_t from = 0; from < 3; ++from) {
    for (std::size_t to = 0; to < 3; ++to)
      EXPECT_EQ(refusal(kParameters[from], kParameters[to]).empty(), to == (from + 1) % 3);
  }
  using G = GradientState;
  const auto is_arrow = [](std::size_t from, std::size_t to) { return to == from + 1 || (from == 0 && to == 2); };
  constexpr std::array<G, 4> kGradients{G::kEmpty, G::kFilling, G::kReducing, G::kReduced};
  for (std::size_t from = 0; from < 4; ++from) {
    for (std::size_t to = 0; to < 4; ++to)
      EXPECT_EQ(refusal(kGradients[from], kGradients[to]).empty(), is_arrow(from, to));
  }
}

TEST(UnitStateTest, NamesTheUnitAndBothStates) {
  EXPECT_THAT(refusal(ParameterState::kSharded, ParameterState::kResident),
              ::testing::AllOf(::testing::HasSubstr("layers.3"), ::testing::HasSubstr("Sharded"),
                               ::testing::HasSubstr("Resident")));
}

}  // namespace
}  // namespace fsdp
