// keep_gathered and summon.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <mutex>

#include "tests/behaviour/function_model.h"

namespace fsdp::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void on_ranks(int world_size, const std::function<void(const Context&, FunctionModel&, Engine&, Optimizer&)>& body,
              ShardOptions options = {}, const RunRanksOptions& ranks = {}) {
  options.units = units_named({"a", "b"});
  run_ranks(
      world_size,
      [&](const Context& context) {
        at::set_num_threads(1);
        const auto model = in_turn([] {
          at::manual_seed(5);
          return std::make_shared<FunctionModel>(plain_function);
        });
        Engine engine = shard(context, model, options);
        Optimizer optimizer = engine.optimizer(SGD{.lr = 0.1});
        body(context, *model, engine, optimizer);
      },
      ranks);
}

TEST(KeepGatheredTest, GathersEachUnitOnceHoweverManyForwardsARankRuns) {
  std::map<std::pair<int, std::string>, int> gathers;
  std::mutex mutex;
  on_ranks(3,
           [](const Context& context, FunctionModel& model, Engine& engine, Optimizer&) {
             const at::NoGradGuard no_grad;
             const at::Tensor x = function_batch(0).input;
             const at::Tensor expected = plain_function(model, x);
             {
               const KeepGathered scope = engine.keep_gathered();
               for (int i = 0; i < 5 + 20 * context.rank(); ++i)  // lengths differ between ranks: C45
                 expect_equal(plain_function(model, x), expected, 0, 0, "output");
             }
             EXPECT_LE(engine.memory().resident_bytes, 3 * engine.plan().slot_bytes);
           },
           {.prefetch = 0}, {.on_record = [&](int rank, const CommunicatorRecord& record) {
             const std::lock_guard lock(mutex);
             if (record.operation == "gather") ++gathers[{rank, std::string(record.label)}];
           }});
  for (const auto& [key, count] : gathers) EXPECT_LE(count, 3) << key.second << " on rank " << key.first;
}

TEST(KeepGatheredTest, HoldsMoreThanTheArenaAndGivesItBack) {
  run_ranks(2, [](const Context& context) {
    const auto model = in_turn([] { return std::make_shared<StackModel>(8, 32); });
    Engine engine = shard(context, model, {.units = units<torch::nn::Linear>()});
    const at::NoGradGuard no_grad;
    const std::size_t unit = (32 * 32 + 32) * sizeof(float);
    {
      const KeepGathered scope = engine.keep_gathered();
      model->forward(at::ones({1, 32}));
      EXPECT_EQ(engine.memory().resident_bytes, 8 * unit);
    }
    model->forward(at::ones({1, 32}));
    EXPECT_LE(engine.memory().resident_bytes, 3 * unit);
  });
}

TEST(KeepGatheredTest, SeesWhatAStepChanges) {
  on_ranks(2, [](const Context& context, FunctionModel& model, Engine& engine, Optimizer& optimizer) {
    const KeepGathered scope = engine.keep_gathered();
    for (int step = 0; step < 3; ++step) {
      const at::Tensor before = model.w.detach().clone();
      const Batch batch = part_of(function_batch(step), context.rank(), context.world_size());
      model.loss(batch.input, batch.target).backward();
      optimizer.step();
      EXPECT_FALSE(at::equal(model.w.detach().clone(), before));
    }
  });
}

TEST(SummonTest, MakesEveryParameterReadableByPointer) {
  for (const Strategy strategy : kStrategies) {
    for (const int world_size : {1, 2, 3}) {
      on_ranks(
          world_size,
          [](const Context&, FunctionModel& model, Engine& engine, Optimizer&) {
            const Tensors expected = parameters_of(model);
            {
              const Summoned scope = engine.summon();
              for (const auto& item : model.named_parameters()) {
                const at::Tensor& tensor = item.value();
                EXPECT_EQ(
                    std::memcmp(tensor.const_data_ptr(), expected.at(item.key()).const_data_ptr(), tensor.nbytes()), 0)
                    << item.key();
              }
            }
            // The plainest way to be told, and only where the memory is not there by itself.
            if (engine.plan().units.front().strategy == "kFullShard") {
              const Tensors evict = parameters_of(model);
              EXPECT_THAT(text_of<std::exception>([&] {
                            for (const auto& item : model.named_parameters()) item.value().const_data_ptr();
                            for (const auto& item : model.named_parameters()) item.value().data_ptr<float>();
                          }),
                          HasSubstr("raw pointer"));
            }
          },
          {.strategy = strategy, .prefetch = 0});
    }
  }
}

TEST(SummonTest, KeepsWhatIsWrittenByPointerOnlyWhenAsked) {
  for (const Strategy strategy : kStrategies) {
    for (const int world_size : {1, 2, 4}) {
      on_ranks(world_size,
               [&](const Context& context, FunctionModel& model, Engine& engine, Optimizer&) {
                 Tensors expected = parameters_of(model);
                 {
                   Summoned scope = engine.summon({.writeback = true});
                   // Every rank writes one element, rank 0 a whole bias.
                   model.w.data_ptr<float>()[17 + context.rank()] = static_cast<float>(100 + context.rank());
                   if (context.is_main()) std::fill_n(model.b->bias.data_ptr<float>(), 16, 7.0F);
                   scope.close();
                 }
                 const at::NoGradGuard no_grad;
                 for (int rank = 0; rank < world_size; ++rank) expected.at("w").view(-1)[17 + rank] = 100 + rank;
                 expected.at("b.bias").fill_(7);
                 for (const auto& [name, value] : parameters_of(model))
                   expect_equal(value, expected.at(name), 0, 0, name);
               },
               {.strategy = strategy});
    }
  }
}

TEST(SummonTest, ShowsWholeGradientsAndPutsThePlaceholdersBack) {
  for (const Strategy strategy : kStrategies) {
    const Training training = function_training();
    Trace plain = train_plain(training);
    on_ranks(2,
             [&](const Context& context, FunctionModel& model, Engine& engine, Optimizer& optimizer) {
               const Batch batch = part_of(function_batch(0), context.rank(), context.world_size());
               model.loss(batch.input, batch.target).backward();
               {
                 const Summoned scope = engine.summon({.gradients = true});
                 for (const auto& item : model.named_parameters())
                   expect_equal(item.value().grad(), plain.gradients[0].at(item.key()), 1e-6, 1e-5, item.key());
                 EXPECT_THAT(text_of<InvalidArgument>([&] { optimizer.step(); }), HasSubstr("Engine::summon"));
               }
               EXPECT_THROW(model.w.grad().sum(), std::exception);
               optimizer.step();
               EXPECT_EQ(engine.step(), 1);
             },
             {.strategy = strategy});
  }
}

TEST(SummonTest, RefusesASecondScopeAndABackwardWithinOne) {
  on_ranks(2, [](const Context&, FunctionModel& model, Engine& engine, Optimizer& optimizer) {
    const Batch batch = function_batch(0);
    {
      const Summoned scope = engine.summon();
      EXPECT_THAT(text_of<InvalidArgument>([&] { const Summoned second = engine.summon(); }),
                  HasSubstr("close the first"));
      EXPECT_THAT(text_of<InvalidArgument>([&] { model.loss(batch.input, batch.target).backward(); }),
                  AllOf(HasSubstr("summon"), HasSubstr("outside of the scope")));
    }
    model.zero_grad();
    model.loss(batch.input, batch.target).backward();
    optimizer.step();
    EXPECT_EQ(engine.step(), 1);
  });
}

}  // namespace
}  // namespace fsdp::testing
