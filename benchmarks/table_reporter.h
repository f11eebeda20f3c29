// One table for one program: Google Benchmark's own console starts a new header whenever a benchmark has other
// counters, and sorts them by name.
#pragma once

#include <string>
#include <vector>

#include <benchmark/benchmark.h>

namespace fsdp {

class TableReporter : public benchmark::BenchmarkReporter {
 public:
  struct Column {
    std::string counter;  // empty: the time of one iteration, in the benchmark's unit
    std::string title;
    int decimals = 1;
  };
  explicit TableReporter(std::vector<Column> columns) : columns_(std::move(columns)) {}

  bool ReportContext(const Context& context) override;
  void ReportRuns(const std::vector<Run>& runs) override;
  // Of runs that ended with an error.
  int failures() const { return failures_; }

 private:
  std::string cell(const Run& run, const Column& column) const;

  std::vector<Column> columns_;
  std::size_t name_width_ = 0;
  int failures_ = 0;
};

// main() of a benchmark program: flags of Google Benchmark, one table, exit code 1 if a run failed and 2 for an unknown
// flag.
int run_as_table(int argc, char** argv, std::vector<TableReporter::Column> columns);

}  // namespace fsdp
