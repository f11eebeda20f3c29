// Memory that should have been given back. Sizes are computed from numel by hand; LibTorch's own allocations are
// counted, the engine's segments are taken from the communicator's records.
#include <gtest/gtest.h>

#include <atomic>
#include <fstream>

#include <unistd.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>

#include <fsdp/testing.h>

#include "tests/cases/case_support.h"
#include "tests/support/counting_allocator.h"

namespace fsdp::testing {
namespace {

using torch::nn::Linear;

constexpr std::int64_t kLayers = 8, kWidth = 128;
constexpr std::size_t kUnitBytes = (kWidth * kWidth + kWidth) * sizeof(float);  // splits evenly over 1, 2 and 4 ranks
constexpr std::size_t kModelBytes = kLayers * kUnitBytes;
constexpr std::size_t kSlackBytes = 24u << 10;  // segments end on pages; mailboxes; a root unit of a few bytes

std::size_t shard_bytes(int world_size) { return kModelBytes / static_cast<std::size_t>(world_size); }
std::size_t resident_limit(int prefetch) { return static_cast<std::size_t>(prefetch + 1) * kUnitBytes; }

Batch batch_of(int step, std::int64_t width = kWidth) {
  return rows(4, width, width, 700 + static_cast<std::uint64_t>(step));
}

class MemoryCase : public ::testing::TestWithParam<std::tuple<int, int>> {  // world size, prefetch
 protected:
  static void SetUpTestSuite() { CountingAllocator::install(); }

  int world_size() const { return std::get<0>(GetParam()); }
  int prefetch() const { return std::get<1>(GetParam()); }

  // Runs the body on each rank; then all segments of all ranks must fit the shards of `shards` kinds (parameters and
  // gradients) and the arena.
  void run_within(std::size_t shards, const std::function<void(const Context&)>& body) {
    std::atomic<std::size_t> segment_bytes{0};
    RunRanksOptions options;
    options.on_record = [&](int, const CommunicatorRecord& record) {
      if (record.operation == "allocate") segment_bytes += record.bytes;
    };
    run_ranks(world_size(), body, options);
    // Without the one that shard() hands out rank 0's weights from and frees.
    const std::size_t of_rank = segment_bytes / static_cast<std::size_t>(world_size()) -
                                kWidth * kWidth * sizeof(float);
    const std::size_t arena = static_cast<std::size_t>(prefetch() + 2) * kUnitBytes;
    EXPECT_GE(of_rank, shards * shard_bytes(world_size()) + arena) << "the measurement has lost something";
    EXPECT_LE(of_rank, shards * shard_bytes(world_size()) + arena + kSlackBytes);
  }

  // LibTorch's live bytes while no rank is at work.
  static std::size_t live_bytes(Session& session) {
    if (session.context() != nullptr) session.context()->communicator().barrier();
    const std::size_t bytes = CountingAllocator::install().live_bytes();
    if (session.context() != nullptr) session.context()->communicator().barrier();
    return bytes;
  }
};

const auto kGrid = ::testing::Combine(::testing::Values(1, 2, 4), ::testing::Values(0, 1));

using C33ParametersAfterTraining = MemoryCase;

// C33: parameters are sharded when training begins and stay gathered when it ends: the last unit, or what was gathered
// ahead for a next step that never comes. After steps, and after a query of the gradients, only the shards are there.
// After an evaluation, whose end nobody can see, its last units are still in the arena, which is no larger for it.
TEST_P(C33ParametersAfterTraining, AreShardsOnly) {
  run_within(2, [this](const Context& context) {
    at::set_num_threads(1);
    auto model = std::make_shared<StackModel>(kLayers, kWidth);
    Engine engine = shard(context, model, {.units = units<Linear>(), .prefetch = prefetch()});
    Optimizer optimizer = engine.optimizer(AdamW{});
    const auto backward = [&](int step) {
      const Batch batch = part_of(batch_of(step), context.rank(), context.world_size());
      model->loss(batch.input, batch.target).backward();
    };
    for (int step = 0; step < 3; ++step) {
      backward(step);
      EXPECT_GT(optimizer.step({.max_grad_norm = 1}).grad_norm, 0);
      EXPECT_EQ(resident_parameter_bytes(*model), 0U) << "after step " << step;
    }
    const MemoryReport report = engine.memory();
    EXPECT_GE(report.parameter_shard_bytes, shard_bytes(context.world_size()));
    EXPECT_LE(report.parameter_shard_bytes, shard_bytes(context.world_size()) + kSlackBytes);
    {
      const at::NoGradGuard no_grad;
      model->forward(batch_of(9).input);
      EXPECT_LE(engine.memory().resident_bytes, resident_limit(prefetch())) << "after an evaluation";
    }
    backward(3);
    engine.gradient_views();
    EXPECT_EQ(resident_parameter_bytes(*model), 0U) << "after a query of the gradients";
    optimizer.step();
    EXPECT_EQ(resident_parameter_bytes(*model), 0U) << "after the last step";
    EXPECT_EQ(engine.memory().total_bytes(), report.total_bytes());
    EXPECT_EQ(engine.memory().overflows, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Grid, C33ParametersAfterTraining, kGrid);

struct InnerImpl final : torch::nn::Module {
  InnerImpl() : fc(register_module("fc", Linear(kWidth, kWidth))) {}
  Linear fc{nullptr};
};
TORCH_MODULE(Inner);

// Its own weights are used before and after those of the unit inside it.
struct OuterImpl final : torch::nn::Module {
  OuterImpl() : fc(register_module("fc", Linear(kWidth, kWidth))), inner(register_module("inner", Inner())) {}
  Linear fc{nullptr};
  Inner inner{nullptr};
};
TORCH_MODULE(Outer);

class NestedModel final : public RowModel {
 public:
  NestedModel() : RowModel("NestedModel") {
    scale = register_parameter("scale", at::ones({kWidth}));
    outers = register_module("outers", torch::nn::ModuleList());
    for (std::int64_t i = 0; i < kLayers / 2; ++i) outers->push_back(Outer());
  }
  at::Tensor forward(const at::Tensor& input) override {
    at::Tensor x = input * scale;
    for (std::size_t i = 0; i < outers->size(); ++i) {
      auto& outer = *outers[i]->as<Outer>();
      for (Linear fc : {outer.fc, outer.inner->fc, outer.fc}) {
        x = at::tanh(fc(x));
        if (probe) probe();
      }
    }
    return x * scale;
  }
  std::function<void()> probe;
  at::Tensor scale;
  torch::nn::ModuleList outers{nullptr};
};

using C34ForwardWithoutGradients = MemoryCase;

// C34: a forward without gradients leaves nested units gathered, since the release hangs on backward, on the training
// flag, or on a rule for the root that reaches its children. At no moment are more units there than the arena has room
// for, and no more after the call.
TEST_P(C34ForwardWithoutGradients, HoldsTheArenaAndNoMoreWhileItRunsAndAfterIt) {
  CountingAllocator& allocator = CountingAllocator::install();
  run_within(2, [&](const Context& context) {
    at::set_num_threads(1);
    auto model = std::make_shared<NestedModel>();
    Engine engine = shard(context, model, {.units = units<Inner, Outer>(), .prefetch = prefetch()});
    ASSERT_EQ(engine.plan().units.size(), static_cast<std::size_t>(kLayers + 1));
    model->probe = [&] { EXPECT_LE(engine.memory().resident_bytes, resident_limit(prefetch())) << "during forward"; };
    const at::Tensor input = batch_of(0).input;
    for (const bool inference_mode : {false, true}) {
      for (const bool training_flag : {true, false}) {
        const c10::InferenceMode guard(inference_mode);
        const at::NoGradGuard no_grad;
        model->train(training_flag);
        for (int pass = 0; pass < 3; ++pass) {
          context.communicator().barrier();
          const std::size_t before = allocator.live_bytes();
          if (context.is_main()) allocator.reset_peak();
          context.communicator().barrier();
          model->forward(input);
          context.communicator().barrier();
          EXPECT_LT(allocator.peak_bytes(), before + kUnitBytes) << "a unit beside the arena";
          EXPECT_LE(engine.memory().resident_bytes, resident_limit(prefetch())) << "after forward";
        }
      }
    }
    EXPECT_EQ(engine.memory().overflows, 0);
  });
}

INSTANTIATE_TEST_SUITE_P(Grid, C34ForwardWithoutGradients, kGrid);

using C35ForwardWithGradients = MemoryCase;

// C35: autograd's own references keep freed weights alive until backward, so that sharding saves nothing. After
// forward, with the graph alive, the arena's units are resident at most, and LibTorch holds small activations only. The
// gradients then equal the reference.
TEST_P(C35ForwardWithGradients, KeepsNoWeightsForBackward) {
  Scenario scenario{
      .make_model = seeded<StackModel>(kLayers, kWidth), .units = units<Linear>(), .prefetch = prefetch()};
  scenario.script = [this](Session& session) {
    for (int step = 0; step < 3; ++step) {
      const std::string when = "step " + std::to_string(step);
      const Batch batch = session.part(batch_of(step));
      const std::size_t before = live_bytes(session);
      const at::Tensor loss = session.model().loss(batch.input, batch.target);
      const std::size_t after = live_bytes(session);
      if (session.engine() != nullptr) {
        EXPECT_LT(after, before + kUnitBytes) << when;
        EXPECT_LE(session.engine()->memory().resident_bytes, resident_limit(prefetch())) << when;
        EXPECT_EQ(session.engine()->memory().peak_overflow_bytes, 0U) << when;
      }
      loss.backward();
      session.see_gradients(when);
      session.step();
    }
    session.see_parameters("end");
  };
  const Tensors expected = run_plain(scenario);
  run_within(2, [&](const Context& context) {
    const Tensors seen = run_sharded(scenario, context);
    if (context.is_main()) expect_same_seen(seen, expected);
  });
}

INSTANTIATE_TEST_SUITE_P(Grid, C35ForwardWithGradients, kGrid);

using C41GradientsAfterBackward = MemoryCase;

void expect_no_full_gradient(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters()) {
    ASSERT_TRUE(item.value().grad().defined()) << item.key();
    EXPECT_THROW(item.value().grad().const_data_ptr(), c10::Error) << item.key();
  }
}

// C41: after backward each rank holds full gradients, beside the shards made from them. Between backward and step there
// is one share of the gradients per rank, and nothing behind the parameters' own .grad. Width 129 makes shares that are
// padded.
TEST_P(C41GradientsAfterBackward, AreOneShareOfTheModel) {
  for (const std::int64_t width : {kWidth, kWidth + 1}) {
    Scenario scenario{
        .make_model = seeded<StackModel>(kLayers, width), .units = units<Linear>(), .prefetch = prefetch()};
    scenario.script = [&](Session& session) {
      for (int step = 0; step < 4; ++step) {
        const std::string when = "step " + std::to_string(step);
        const Batch batch = session.part(batch_of(step, width));
        const std::size_t before = live_bytes(session);
        session.model().loss(batch.input, batch.target).backward();
        if (session.engine() != nullptr) {
          // The first step has no plan yet: there, buffers may still wait for peers when backward ends.
          if (step > 0) {
            EXPECT_LT(live_bytes(session), before + kUnitBytes) << when;
          }
          session.engine()->gradient_views();
          EXPECT_LT(live_bytes(session), before + kUnitBytes) << when;
          expect_no_full_gradient(session.model());
          const MemoryReport report = session.engine()->memory();
          EXPECT_EQ(report.held_gradient_bytes, 0U) << when;
          const std::size_t share = static_cast<std::size_t>(kLayers * (width * width + width)) * sizeof(float) /
                                    static_cast<std::size_t>(world_size());
          EXPECT_GE(report.gradient_shard_bytes, share);
          EXPECT_LE(report.gradient_shard_bytes, share + kSlackBytes);
        }
        session.see_gradients(when);
        session.step();
      }
      session.see_parameters("end");
    };
    expect_equals_reference(scenario, {world_size()});
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, C41GradientsAfterBackward, kGrid);

class C92LongRun : public ::testing::TestWithParam<int> {
 protected:
  static void SetUpTestSuite() { CountingAllocator::install(); }
};

std::size_t resident_set_bytes() {
  std::ifstream statm("/proc/self/statm");
  std::size_t total_pages = 0, resident_pages = 0;
  statm >> total_pages >> resident_pages;
  return resident_pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

// C92: memory grows with each iteration: a flat tensor per step, held by a graph, a work handle or a list that is never
// cleared. A thousand steps of a model of 1 MB, with an evaluation each hundred, end with the memory of the first
// hundred.
TEST_P(C92LongRun, EndsWithTheMemoryItBeganWith) {
  CountingAllocator& allocator = CountingAllocator::install();
  run_ranks(GetParam(), [&](const Context& context) {
    at::set_num_threads(1);
    auto model = std::make_shared<StackModel>(4, 256);
    Engine engine = shard(context, model, {.units = units<Linear>()});
    Optimizer optimizer = engine.optimizer(AdamW{});
    const Batch batch = part_of(rows(4, 256, 256, 800), context.rank(), context.world_size());
    std::size_t live = 0, resident_set = 0;
    for (int step = 1; step <= 1000; ++step) {
      model->loss(batch.input, batch.target).backward();
      optimizer.step({.max_grad_norm = 1});
      if (step % 100 != 0) continue;
      {
        const at::NoGradGuard no_grad;
        model->loss(batch.input, batch.target);
      }
      context.communicator().barrier();
      if (step == 100) {
        live = allocator.live_bytes();
        resident_set = resident_set_bytes();
      }
      EXPECT_EQ(allocator.live_bytes(), live) << "tensors, after step " << step;
      if (step == 1000) {
        EXPECT_LE(static_cast<double>(resident_set_bytes()), 1.02 * static_cast<double>(resident_set))
            << "resident set";
      }
      context.communicator().barrier();
    }
  });
}

INSTANTIATE_TEST_SUITE_P(WorldSizes, C92LongRun, ::testing::Values(1, 2));

}  // namespace
}  // namespace fsdp::testing
