// Peak bytes of one rank by purpose, for the same rows per rank: plain LibTorch, and sharded over 1, 2 and 4 processes.
// Beside it the bound, computed from the model's shape alone: 16 bytes per parameter (parameter, gradient, two moments)
// over W, and three times the largest unit.
#include <cmath>
#include <stdexcept>

#include <benchmark/benchmark.h>
#include <fmt/format.h>

#include "benchmarks/gpt_worker.h"
#include "benchmarks/table_reporter.h"

namespace {

constexpr int kWarmUpSteps = 1, kMeasuredSteps = 4;
constexpr std::int64_t kRowsPerRank = 2;
constexpr int kPlain = 0;  // in place of a world size
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
  state.counters["parameters"] = mebibytes(memory.parameters);
  state.counters["gradients"] = mebibytes(memory.gradients);
  state.counters["optimizer"] = mebibytes(memory.optimizer);
  state.counters["arena"] = mebibytes(memory.arena + memory.overflow);
  state.counters["communication"] = mebibytes(memory.communication);
  state.counters["engine"] = mebibytes(memory.engine());
  state.counters["activations"] = mebibytes(memory.activations);
  state.counters["total"] = mebibytes(memory.total());
}

// Every row of a shape is compared with plain LibTorch measured just before it.
void run(benchmark::State& state, fsdp::Workload workload, int world_size) {
  for (auto _ : state) {
    const auto plain = measure(1, [&] { return fsdp::prepare_plain(workload); });
    auto measurement = plain;
    if (world_size != kPlain) {
      workload.rows = kRowsPerRank * world_size;
      measurement = measure(world_size, [&] { return fsdp::prepare_sharded(workload); });
      state.counters["bound"] = bound(workload.model, world_size) / (1 << 20);
    }
    fill(state, measurement.memory);
    state.counters["of_plain"] = static_cast<double>(measurement.memory.total()) /
                                 static_cast<double>(plain.memory.total());
    state.SetIterationTime(measurement.seconds / kMeasuredSteps);
  }
}

void add(const std::string& name, const fsdp::Workload& workload, int world_size) {
  const auto body = [workload, world_size](benchmark::State& state) {
    try {
      run(state, workload, world_size);
    } catch (const std::exception& error) {
      state.SkipWithError(error.what());
    }
  };
  benchmark::RegisterBenchmark(name.c_str(), body)->Iterations(1)->UseManualTime()->Unit(benchmark::kMillisecond);
}

void register_shape(const gpt::Config& model) {
  const fsdp::Workload workload{.model = model, .rows = kRowsPerRank};
  const auto name = fmt::format("memory_MiB/{}x{}", model.layers, model.width);
  add(name + "/plain", workload, kPlain);
  for (const int world_size : {1, 2, 4}) add(fmt::format("{}/full_shard/W:{}", name, world_size), workload, world_size);
}

}  // namespace

int main(int argc, char** argv) {
  register_shape({.layers = 4, .width = 256, .heads = 8, .context = 128});
  register_shape({.layers = 12, .width = 512, .heads = 8, .context = 128});
  return fsdp::run_as_table(argc, argv,
                            {{.counter = "parameters", .title = "param"},
                             {.counter = "gradients", .title = "grad"},
                             {.counter = "optimizer", .title = "adam"},
                             {.counter = "arena", .title = "arena"},
                             {.counter = "communication", .title = "comm"},
                             {.counter = "engine", .title = "sum"},
                             {.counter = "bound", .title = "bound"},
                             {.counter = "activations", .title = "activ."},
                             {.counter = "total", .title = "total"},
                             {.counter = "of_plain", .title = "of plain", .decimals = 3}});
}
