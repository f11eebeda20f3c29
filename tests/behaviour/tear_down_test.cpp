// The objects of a rank go in any order, in a healthy end and while an exception unwinds it, wherever in a step that is: no
// rank waits for another in vain, and each ends with its own result or with the reason.
#include <algorithm>
#include <optional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

using ::testing::HasSubstr;

enum class Part { kContext, kModel, kEngine, kOptimizer, kLoss };
constexpr std::array kParts{Part::kContext, Part::kModel, Part::kEngine, Part::kOptimizer, Part::kLoss};
constexpr const char* kPartNames = "cmeol";

enum class Moment { kAfterForward, kAfterBackward, kAfterStep };

struct TearDown {
  std::array<Part, 5> order;
  Moment moment;
};

std::string name_of(const TearDown& tear_down) {
  std::string name = std::array{"AfterForward", "AfterBackward",
                                "AfterStep"}[static_cast<std::size_t>(tear_down.moment)];
  for (const Part part : tear_down.order) name += kPartNames[static_cast<std::size_t>(part)];
  return name;
}
void PrintTo(const TearDown& value, std::ostream* out) { *out << name_of(value); }

// Twelve orders in which each part is first, last and in between; every one at each moment.
std::vector<TearDown> tear_downs() {
  std::vector<TearDown> all;
  for (const Moment moment : {Moment::kAfterForward, Moment::kAfterBackward, Moment::kAfterStep}) {
    std::array<Part, 5> order = kParts;
    for (int i = 0; i < 12; ++i) {
      all.push_back({order, moment});
      for (int skipped = 0; skipped < 10; ++skipped) std::next_permutation(order.begin(), order.end());
    }
  }
  return all;
}

struct RankObjects {
  std::optional<Context> context;
  std::shared_ptr<FunctionModel> model;
  std::optional<Engine> engine;
  std::optional<Optimizer> optimizer;
  at::Tensor loss;

  RankObjects(const Context& given, const std::array<Part, 5>& order)
      : context(given),
        model(in_turn(make_plain_model)),
        engine(shard(*context, model, {.units = units_named({"a", "b"})})),
        optimizer(engine->optimizer(AdamW{})),
        order_(order) {}
  ~RankObjects() {
    for (const Part part : order_) drop(part);
  }
  RankObjects(const RankObjects&) = delete;
  RankObjects& operator=(const RankObjects&) = delete;

  void run_to(Moment moment) {
    for (int step = 0; step < 2; ++step) {
      const Batch batch = part_of(function_batch(step), context->rank(), context->world_size());
      loss = model->loss(batch.input, batch.target);
      if (step == 1 && moment == Moment::kAfterForward) return;
      loss.backward();
      if (step == 1 && moment == Moment::kAfterBackward) return;
      optimizer->step();
    }
  }

 private:
  void drop(Part part) {
    switch (part) {
      case Part::kContext: context.reset(); return;
      case Part::kModel: model.reset(); return;
      case Part::kEngine: engine.reset(); return;
      case Part::kOptimizer: optimizer.reset(); return;
      case Part::kLoss: loss.reset(); return;
    }
  }
  const std::array<Part, 5> order_;
};

class TearDownTest : public ::testing::TestWithParam<std::tuple<TearDown, const char*>> {};

TEST_P(TearDownTest, InPeaceIsNoError) {
  const auto& [tear_down, backend] = GetParam();
  for (const int world_size : {1, 2}) {
    run_ranks(world_size,
              [&tear_down = tear_down](const Context& context) {
                RankObjects objects(context, tear_down.order);
                objects.run_to(tear_down.moment);
              },
              {.backend = backend, .timeout = std::chrono::seconds(10)});
  }
}

TEST_P(TearDownTest, ByAnExceptionEndsTheOtherRankWithItsText) {
  const auto& [tear_down, backend] = GetParam();
  std::string other;
  EXPECT_THAT(text_of<std::runtime_error>([&, &tear_down = tear_down, &backend = backend] {
                run_ranks(2,
                          [&](const Context& context) {
                            try {
                              RankObjects objects(context, tear_down.order);
                              objects.run_to(tear_down.moment);
                              if (context.rank() == 1) throw std::runtime_error("out of luck");
                              for (int step = 0; step < 3; ++step) objects.run_to(Moment::kAfterStep);
                            } catch (const CommunicationError& error) {
                              other = error.what();
                              throw;
                            }
                          },
                          {.backend = backend, .timeout = std::chrono::seconds(10)});
              }),
              HasSubstr("out of luck"));
  EXPECT_THAT(other, HasSubstr("out of luck"));
}

INSTANTIATE_TEST_SUITE_P(Orders, TearDownTest,
                         ::testing::Combine(::testing::ValuesIn(tear_downs()), ::testing::Values("thread", "tcp")),
                         [](const auto& tested) {
                           return name_of(std::get<0>(tested.param)) + name_of_backend(std::get<1>(tested.param));
                         });

}  // namespace
}  // namespace fsdp::testing
