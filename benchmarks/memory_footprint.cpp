// Peak bytes of one rank by purpose, for the same rows per rank: plain LibTorch, and sharded over 1, 2 and 4 processes. Beside it the bound,
// computed from the model's shape alone: 16 bytes per parameter (parameter, gradient, two moments) over W, and three times the largest unit.
#include <cmath>
#include <stdexcept>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "benchmarks/gpt_worker.h"

namespace {

constexpr int kWarmUpSteps = 1, kMeasuredSteps = 4;
constexpr std::int64_t kRowsPerRank = 2;
constexpr std::int64_t kBytesPerParameter = 16, kBytesPerElement = 4, kUnitsInArena = 3;

double mebibytes(std::size_t bytes) { return static_cast<double>(bytes) / (1 << 20); }

double bound(const gpt::Config& model, int world_size) {
  const auto states = std::ceil(static_cast<double>(kBytesPerParameter * fsdp::model_numel(model)) / world_size);
  return states + static_cast<double>(kUnitsInArena * kBytesPerElement * fsdp::largest_unit_numel(model));
}

fsdp::Measurement measure(int world_size, const std::function<fsdp::Block()>& prepare) {
  fsdp::WorkerGroup workers(world_size, prepare);
  workers.run(kWarmUpSteps);
  return workers.run(kMeasuredSteps);
}

void fill(benchmark::State& state, const fsdp::RankMemory& memory) {
  state.counters["1_param"] = mebibytes(memory.parameters);
  state.counters["2_grad"] = mebibytes(memory.gradients);
  state.counters["3_adam"] = mebibytes(memory.optimizer);
  state.counters["4_arena"] = mebibytes(memory.arena + memory.overflow);
  state.counters["5_comm"] = mebibytes(memory.communication);
  state.counters["6_engine"] = mebibytes(memory.engine());
  state.counters["8_activ"] = mebibytes(memory.activations);
  state.counters["9_total"] = mebibytes(memory.total());
}

void run_plain(benchmark::State& state, const fsdp::Workload& workload) {
  for (auto _ : state) {
    const auto measurement = measure(1, [&] { return fsdp::prepare_plain(workload); });
    fill(state, measurement.memory);
    state.SetIterationTime(measurement.seconds / kMeasuredSteps);
  }
}

void run_sharded(benchmark::State& state, fsdp::Workload workload, int world_size) {
  workload.rows = kRowsPerRank * world_size;
  for (auto _ : state) {
    const auto measurement = measure(world_size, [&] { return fsdp::prepare_sharded(workload); });
    fill(state, measurement.memory);
    state.counters["7_bound"] = bound(workload.model, world_size) / (1 << 20);
    state.SetIterationTime(measurement.seconds / kMeasuredSteps);
  }
}

template <class Body>
void add(const std::string& name, Body body) {
  const auto guarded = [body](benchmark::State& state) {
    try {
      body(state);
    } catch (const std::exception& error) {
      state.SkipWithError(error.what());
    }
  };
  benchmark::RegisterBenchmark(name.c_str(), guarded)->Iterations(1)->UseManualTime()->Unit(benchmark::kMillisecond);
}

void register_shape(const gpt::Config& model) {
  const fsdp::Workload workload{.model = model, .rows = kRowsPerRank};
  const auto name = fmt::format("memory_MiB/{}x{}", model.layers, model.width);
  add(name + "/plain", [workload](benchmark::State& state) { run_plain(state, workload); });
  for (const int world_size : {1, 2, 4}) {
    add(fmt::format("{}/full_shard/W:{}", name, world_size),
        [workload, world_size](benchmark::State& state) { run_sharded(state, workload, world_size); });
  }
}

}  // namespace

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  register_shape({.layers = 4, .width = 256, .heads = 8, .context = 128});
  register_shape({.layers = 12, .width = 512, .heads = 8, .context = 128});
  benchmark::ConsoleReporter table(benchmark::ConsoleReporter::OO_Tabular);
  benchmark::RunSpecifiedBenchmarks(&table);
  return 0;
}
