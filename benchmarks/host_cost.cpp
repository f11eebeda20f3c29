// What the engine itself costs per unit and per parameter: models of many tiny units, of which a step is next to no
// arithmetic, sharded over one rank against the same step in plain LibTorch. Time and instructions of the whole
// process, the engine's own thread included, in blocks that alternate as A B B A.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <vector>

#include <linux/perf_event.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <fsdp/fsdp.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "benchmarks/table_reporter.h"

namespace {

constexpr int kRounds = 15, kStepsPerBlock = 4, kWarmUpSteps = 4;
constexpr std::int64_t kNumel = 100;

// Instructions in user space of this process and of the threads that it starts afterwards; 0 where the machine has no
// such counter.
class InstructionCounter {
 public:
  InstructionCounter() {
    perf_event_attr attributes{};
    attributes.size = sizeof(attributes);
    attributes.type = PERF_TYPE_HARDWARE;
    attributes.config = PERF_COUNT_HW_INSTRUCTIONS;
    attributes.inherit = 1;
    attributes.exclude_kernel = attributes.exclude_hv = 1;
    descriptor_ = static_cast<int>(syscall(SYS_perf_event_open, &attributes, 0, -1, -1, 0));
  }
  InstructionCounter(const InstructionCounter&) = delete;
  InstructionCounter& operator=(const InstructionCounter&) = delete;
  ~InstructionCounter() {
    if (descriptor_ >= 0) close(descriptor_);
  }
  double read() const {
    std::uint64_t value = 0;
    if (descriptor_ < 0 || ::read(descriptor_, &value, sizeof(value)) != sizeof(value)) return 0;
    return static_cast<double>(value);
  }

 private:
  int descriptor_ = -1;
};

struct TinyUnitImpl final : torch::nn::Module {
  explicit TinyUnitImpl(int count) {
    for (int i = 0; i < count; ++i)
      parameters.push_back(register_parameter(fmt::format("p{}", i), at::zeros({kNumel})));
  }
  at::Tensor forward(at::Tensor x) const {
    for (const at::Tensor& parameter : parameters) x = x + parameter;
    return x;
  }
  std::vector<at::Tensor> parameters;
};
TORCH_MODULE(TinyUnit);

struct TinyModel final : torch::nn::Module {
  TinyModel(int units, int parameters_per_unit) {
    for (int i = 0; i < units; ++i) list->push_back(TinyUnit(parameters_per_unit));
    register_module("list", list);
  }
  void run_backward() const {
    at::Tensor x = at::ones({kNumel});
    for (const auto& unit : *list) x = unit->as<TinyUnitImpl>()->forward(x);
    x.sum().backward();
  }
  torch::nn::ModuleList list;
};

struct Cost {
  double microseconds = 0, instructions = 0;
};

template <class Step>
Cost measure(const InstructionCounter& counter, const Step& step) {
  const double before = counter.read();
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < kStepsPerBlock; ++i) step();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - began;
  return {took.count() / kStepsPerBlock, (counter.read() - before) / kStepsPerBlock};
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void run(benchmark::State& state, int units, int parameters, fsdp::Strategy strategy) {
  at::set_num_threads(1);
  const InstructionCounter counter;
  const auto plain = std::make_shared<TinyModel>(units, parameters),
             sharded = std::make_shared<TinyModel>(units, parameters);
  auto engine = fsdp::shard(fsdp::init(), std::static_pointer_cast<torch::nn::Module>(sharded),
                            {.units = fsdp::units<TinyUnit>(), .strategy = strategy});
  auto optimizer = engine.optimizer(fsdp::SGD{.lr = 0.1});
  const auto tensors = plain->parameters();
  const auto plain_step = [&] {
    plain->run_backward();
    const at::NoGradGuard no_grad;
    for (const at::Tensor& tensor : tensors) {
      tensor.sub_(tensor.grad(), 0.1);
      tensor.mutable_grad().reset();
    }
  };
  const auto sharded_step = [&] {
    sharded->run_backward();
    optimizer.step();
  };
  for (int i = 0; i < kWarmUpSteps; ++i) {
    plain_step();
    sharded_step();
  }
  std::vector<double> time, instructions, plain_time;
  for (auto _ : state) {
    const Cost a = measure(counter, plain_step), b = measure(counter, sharded_step);
    const Cost b_again = measure(counter, sharded_step), a_again = measure(counter, plain_step);
    time.push_back((b.microseconds + b_again.microseconds - a.microseconds - a_again.microseconds) / 2);
    instructions.push_back((b.instructions + b_again.instructions - a.instructions - a_again.instructions) / 2);
    plain_time.push_back((a.microseconds + a_again.microseconds) / 2);
    state.SetIterationTime((b.microseconds + b_again.microseconds) / 2 * 1e-6);
  }
  state.counters["plain_us"] = median(plain_time);
  state.counters["per_unit_us"] = median(time) / units;
  state.counters["per_parameter_us"] = median(time) / (units * parameters);
  state.counters["per_unit_instructions"] = median(instructions) / units;
}

}  // namespace

int main(int argc, char** argv) {
  struct Shape {
    int units, parameters;
  };
  constexpr std::pair<const char*, fsdp::Strategy> kStrategies[] = {{"full_shard", fsdp::Strategy::kFullShard},
                                                                    {"replicate", fsdp::Strategy::kReplicate}};
  for (const auto& [name, strategy] : kStrategies) {
    for (const Shape shape : {Shape{200, 1}, Shape{100, 4}, Shape{20, 40}}) {
      const auto title = fmt::format("host_cost/{}/{}_units_of_{}", name, shape.units, shape.parameters);
      benchmark::RegisterBenchmark(title.c_str(),
                                   [shape, strategy = strategy](benchmark::State& state) {
                                     run(state, shape.units, shape.parameters, strategy);
                                   })
          ->Iterations(kRounds)
          ->UseManualTime()
          ->Unit(benchmark::kMicrosecond);
    }
  }
  return fsdp::run_as_table(argc, argv,
                            {{.counter = "", .title = "step us"},
                             {.counter = "plain_us", .title = "plain us"},
                             {.counter = "per_unit_us", .title = "us/unit", .decimals = 2},
                             {.counter = "per_parameter_us", .title = "us/param", .decimals = 2},
                             {.counter = "per_unit_instructions", .title = "ins/unit", .decimals = 0}});
}
