#include "benchmarks/table_reporter.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

namespace fsdp {

namespace {

constexpr int kCellWidth = 10;

// "train_step/4x128/full_shard/W:2/iterations:9/manual_time" without what is the same in every row.
std::string row_name(const std::string& name) { return name.substr(0, name.find("/iterations:")); }

}  // namespace

bool TableReporter::ReportContext(const Context& context) {
  const auto& cpu = context.cpu_info;
  std::string load;
  for (const double value : cpu.load_avg) load += fmt::format(" {:.2f}", value);
  fmt::print("{} cores at {:.0f} MHz, load average{}\n\n", cpu.num_cpus, cpu.cycles_per_second / 1e6, load);
  name_width_ = std::max(context.name_field_width - std::string("/iterations:1/manual_time").size(), std::size_t{12});
  fmt::print("{:<{}}", "", name_width_);
  for (const auto& column : columns_) fmt::print("{:>{}}", column.title, kCellWidth);
  fmt::print("\n");
  return true;
}

void TableReporter::ReportRuns(const std::vector<Run>& runs) {
  for (const auto& run : runs) {
    fmt::print("{:<{}}", row_name(run.benchmark_name()), name_width_);
    if (run.error_occurred) {
      ++failures_;
      fmt::print("  failed: {}", run.error_message);
    } else {
      for (const auto& column : columns_) fmt::print("{:>{}}", cell(run, column), kCellWidth);
    }
    fmt::print("\n");
  }
  std::fflush(stdout);
}

std::string TableReporter::cell(const Run& run, const Column& column) const {
  if (column.counter.empty()) return fmt::format("{:.{}f}", run.GetAdjustedRealTime(), column.decimals);
  const auto counter = run.counters.find(column.counter);
  return counter == run.counters.end() ? "-" : fmt::format("{:.{}f}", counter->second.value, column.decimals);
}

int run_as_table(int argc, char** argv, std::vector<TableReporter::Column> columns) {
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  TableReporter table(std::move(columns));
  benchmark::RunSpecifiedBenchmarks(&table);
  return table.failures() > 0 ? 1 : 0;
}

}  // namespace fsdp
