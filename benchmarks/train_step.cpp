// Step time of the GPT against plain LibTorch in the same minute: blocks of both alternate as A B B A, a round is one
// ratio, and the table has the median and the quartiles of the rounds. The first line of each shape is plain LibTorch
// against itself: what lies within it is noise.
#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <vector>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "benchmarks/gpt_worker.h"
#include "benchmarks/table_reporter.h"

namespace {

constexpr int kRounds = 9, kStepsPerBlock = 4, kWarmUpSteps = 6;
constexpr int kCores = 2;
constexpr double kLossTolerance = 1e-3;

struct Variant {
  const char* name;
  int world_size;
  fsdp::Block (*prepare)(const fsdp::Workload&);
};
constexpr Variant kVariants[] = {
    {"plain_again", 1, fsdp::prepare_plain},
    {"full_shard/W:1", 1, fsdp::prepare_sharded},
    {"full_shard/W:2", 2, fsdp::prepare_sharded},
};

double quantile(std::vector<double> values, double q) {
  std::sort(values.begin(), values.end());
  const double at = q * static_cast<double>(values.size() - 1);
  const auto below = static_cast<std::size_t>(at);
  const auto above = std::min(below + 1, values.size() - 1);
  return values[below] + (at - static_cast<double>(below)) * (values[above] - values[below]);
}

// A time says nothing about a run that computes something else.
void require_same_loss(double plain, double other) {
  if (std::abs(other / plain - 1) < kLossTolerance) return;
  throw std::runtime_error(fmt::format("loss {} differs from plain LibTorch's {}: the times are void", other, plain));
}

fsdp::WorkerGroup start(const Variant& variant, fsdp::Workload workload) {
  workload.threads = std::max(1, kCores / variant.world_size);
  return fsdp::WorkerGroup(variant.world_size, [&variant, workload] { return variant.prepare(workload); });
}

void measure(benchmark::State& state, const Variant& variant, const fsdp::Workload& workload) {
  auto plain = start({"plain", 1, fsdp::prepare_plain}, workload);
  auto other = start(variant, workload);
  plain.run(kWarmUpSteps);
  other.run(kWarmUpSteps);
  std::vector<double> ratios, plain_seconds;
  for (auto _ : state) {
    const auto a = plain.run(kStepsPerBlock), b = other.run(kStepsPerBlock);
    const auto b_again = other.run(kStepsPerBlock), a_again = plain.run(kStepsPerBlock);
    require_same_loss(a.loss, b.loss);
    require_same_loss(a_again.loss, b_again.loss);
    ratios.push_back((b.seconds + b_again.seconds) / (a.seconds + a_again.seconds));
    plain_seconds.push_back((a.seconds + a_again.seconds) / (2 * kStepsPerBlock));
    state.SetIterationTime((b.seconds + b_again.seconds) / (2 * kStepsPerBlock));
  }
  state.counters["plain_ms"] = 1e3 * quantile(plain_seconds, 0.5);
  state.counters["ratio"] = quantile(ratios, 0.5);
  state.counters["ratio_q25"] = quantile(ratios, 0.25);
  state.counters["ratio_q75"] = quantile(ratios, 0.75);
}

void run(benchmark::State& state, const Variant& variant, const fsdp::Workload& workload) {
  try {
    measure(state, variant, workload);
  } catch (const std::exception& error) {
    state.SkipWithError(error.what());
  }
}

void register_shape(const gpt::Config& model) {
  const fsdp::Workload workload{.model = model, .rows = 8, .threads = kCores};
  for (const auto& variant : kVariants) {
    const auto name = fmt::format("train_step/{}x{}/{}", model.layers, model.width, variant.name);
    benchmark::RegisterBenchmark(name.c_str(),
                                 [&variant, workload](benchmark::State& state) { run(state, variant, workload); })
        ->Iterations(kRounds)
        ->UseManualTime()
        ->Unit(benchmark::kMillisecond);
  }
}

}  // namespace

int main(int argc, char** argv) {
  register_shape({.layers = 4, .width = 128, .heads = 4, .context = 128});
  register_shape({.layers = 6, .width = 384, .heads = 6, .context = 128});
  return fsdp::run_as_table(argc, argv,
                            {{.counter = "", .title = "step ms"},
                             {.counter = "plain_ms", .title = "plain ms"},
                             {.counter = "ratio", .title = "ratio", .decimals = 3},
                             {.counter = "ratio_q25", .title = "quartile", .decimals = 3},
                             {.counter = "ratio_q75", .title = "quartile", .decimals = 3}});
}
