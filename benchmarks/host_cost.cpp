// What the engine itself costs per unit and per parameter: models of many tiny units, of which a step is next to no
// arithmetic, sharded over one rank against the same step in plain LibTorch, in blocks that alternate as A B B A.
// `host_cost --steps N UNITS PARAMETERS plain|full_shard|replicate` runs steps and nothing else, for host_cost_instructions.
#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <benchmark/benchmark.h>
#include <fmt/format.h>
#include <fsdp/fsdp.h>
#include <fsdp/testing.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/modulelist.h>

#include "benchmarks/table_reporter.h"

namespace {

constexpr int kRounds = 15, kStepsPerBlock = 10, kWarmUpSteps = 4;
constexpr std::int64_t kNumel = 100;

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

// A step of plain SGD on a model of its own.
class PlainSteps {
 public:
  PlainSteps(int units, int parameters) : model_(units, parameters), tensors_(model_.parameters()) {}
  void operator()() const {
    model_.run_backward();
    const at::NoGradGuard no_grad;
    for (const at::Tensor& tensor : tensors_) {
      tensor.sub_(tensor.grad(), 0.1);
      tensor.mutable_grad().reset();
    }
  }

 private:
  TinyModel model_;
  std::vector<at::Tensor> tensors_;
};

class ShardedSteps {
 public:
  ShardedSteps(const fsdp::Context& context, int units, int parameters, fsdp::Strategy strategy)
      : model_(std::make_shared<TinyModel>(units, parameters)),
        engine_(fsdp::shard(context, std::static_pointer_cast<torch::nn::Module>(model_),
                            {.units = fsdp::units<TinyUnit>(), .strategy = strategy})),
        optimizer_(engine_.optimizer(fsdp::SGD{.lr = 0.1})) {}
  void operator()() {
    model_->run_backward();
    optimizer_.step();
  }

 private:
  std::shared_ptr<TinyModel> model_;
  fsdp::Engine engine_;
  fsdp::Optimizer optimizer_;
};

// Microseconds of one step.
template <class Step>
double measure(Step& step) {
  const auto began = std::chrono::steady_clock::now();
  for (int i = 0; i < kStepsPerBlock; ++i) step();
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - began;
  return took.count() / kStepsPerBlock;
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

void run(benchmark::State& state, const fsdp::Context& context, int units, int parameters, fsdp::Strategy strategy) {
  PlainSteps plain(units, parameters);
  ShardedSteps sharded(context, units, parameters, strategy);
  for (int i = 0; i < kWarmUpSteps; ++i) {
    plain();
    sharded();
  }
  std::vector<double> extra, plain_time;
  for (auto _ : state) {
    const double a = measure(plain), b = measure(sharded), b_again = measure(sharded), a_again = measure(plain);
    extra.push_back((b + b_again - a - a_again) / 2);
    plain_time.push_back((a + a_again) / 2);
    state.SetIterationTime((b + b_again) / 2 * 1e-6);
  }
  state.counters["plain_us"] = median(plain_time);
  state.counters["per_unit_us"] = median(extra) / units;
  state.counters["per_parameter_us"] = median(extra) / (units * parameters);
}

constexpr std::pair<const char*, fsdp::Strategy> kStrategies[] = {{"full_shard", fsdp::Strategy::kFullShard},
                                                                  {"replicate", fsdp::Strategy::kReplicate}};

int run_steps(const fsdp::Context& context, const std::vector<std::string>& arguments) {
  const int steps = std::stoi(arguments.at(0)), units = std::stoi(arguments.at(1)),
            parameters = std::stoi(arguments.at(2));
  const auto repeat = [&](auto&& step) {
    for (int i = 0; i < steps; ++i) step();
    return 0;
  };
  if (arguments.at(3) == "plain") return repeat(PlainSteps(units, parameters));
  for (const auto& [name, strategy] : kStrategies) {
    if (arguments.at(3) == name) return repeat(ShardedSteps(context, units, parameters, strategy));
  }
  return 2;
}

}  // namespace

int main(int argc, char** argv) {
  at::set_num_threads(1);
  struct Shape {
    int units, parameters;
  };
  int status = 0;
  // Thread ranks, as the counter of instructions knows nothing of the system calls that processes meet by.
  fsdp::run_ranks(1,
                  [&](const fsdp::Context& context) {
                    if (argc == 6 && std::string(argv[1]) == "--steps") {
                      status = run_steps(context, {argv + 2, argv + argc});
                      return;
                    }
                    for (const auto& [name, strategy] : kStrategies) {
                      for (const Shape shape : {Shape{200, 1}, Shape{100, 4}, Shape{20, 40}}) {
                        const auto title = fmt::format("host_cost/{}/{}_units_of_{}", name, shape.units,
                                                       shape.parameters);
                        benchmark::RegisterBenchmark(title.c_str(),
                                                     [&, shape, strategy = strategy](benchmark::State& state) {
                                                       run(state, context, shape.units, shape.parameters, strategy);
                                                     })
                            ->Iterations(kRounds)
                            ->UseManualTime()
                            ->Unit(benchmark::kMicrosecond);
                      }
                    }
                    status = fsdp::run_as_table(argc, argv,
                                                {{.counter = "", .title = "step us"},
                                                 {.counter = "plain_us", .title = "plain us"},
                                                 {.counter = "per_unit_us", .title = "us/unit", .decimals = 2},
                                                 {.counter = "per_parameter_us", .title = "us/param", .decimals = 2}});
                  },
                  {.timeout = std::chrono::minutes(10)});
  return status;
}
