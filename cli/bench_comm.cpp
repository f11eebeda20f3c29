#include "cli/bench_comm.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

#include <fsdp/error.h>

#include "comm/stream_copy.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kTargetSeconds = 0.2;
constexpr std::size_t kCopyBytes = std::size_t{256} << 20;

// Small integers, so that sums are exact in any order.
float value_of(int rank, std::int64_t i) { return static_cast<float>((rank + 1) * (1 + i % 7)); }

float sum_of(int world_size, std::int64_t i) {
  return static_cast<float>(world_size * (world_size + 1) / 2) * static_cast<float>(1 + i % 7);
}

// The buffers of one operation at one size: `numel` floats is the largest that a rank holds.
class Exchange {
 public:
  Exchange(Communicator& communicator, std::int64_t share_numel)
      : communicator_(communicator), share_(share_numel), whole_(share_numel * communicator.world_size()) {}

  std::int64_t whole_numel() const { return whole_; }
  int rank() const { return communicator_.rank(); }
  int ranks() const { return communicator_.world_size(); }

  // Fills inputs, makes one call, counts what is wrong in the output; run() is then the call alone.
  std::function<void()> run;
  std::function<std::int64_t()> check;

  void prepare(const std::string& operation) {
    if (operation == "gather") return prepare_gather();
    if (operation == "reduce") return prepare_reduce();
    if (operation == "all_gather") return prepare_all_gather();
    if (operation == "reduce_scatter") return prepare_reduce_scatter();
    if (operation == "all_reduce") return prepare_all_reduce();
    prepare_broadcast();
  }

 private:
  std::int64_t wrong(const std::vector<float>& values, const std::function<float(std::int64_t)>& expected) const {
    std::int64_t count = 0;
    for (std::size_t i = 0; i < values.size(); ++i)
      count += values[i] != expected(static_cast<std::int64_t>(i)) ? 1 : 0;
    return count;
  }
  float gathered(std::int64_t i) const { return share_ == 0 ? 0 : value_of(static_cast<int>(i / share_), i % share_); }
  float reduced(std::int64_t i) const { return sum_of(ranks(), rank() * share_ + i); }
  static std::byte* raw(std::vector<float>& values) { return reinterpret_cast<std::byte*>(values.data()); }
  std::span<float> fill_segment(std::int64_t numel) {
    segment_ = communicator_.allocate(static_cast<std::size_t>(numel) * sizeof(float));
    auto* values = reinterpret_cast<float*>(segment_->local().data());
    for (std::int64_t i = 0; i < numel; ++i) values[i] = value_of(rank(), i);
    communicator_.barrier();
    return {values, static_cast<std::size_t>(numel)};
  }
  void fill_input(std::int64_t numel) {
    input_.resize(static_cast<std::size_t>(numel));
    for (std::int64_t i = 0; i < numel; ++i) input_[static_cast<std::size_t>(i)] = value_of(rank(), i);
  }
  std::size_t share_bytes() const { return static_cast<std::size_t>(share_) * sizeof(float); }

  void prepare_gather() {
    fill_segment(share_);
    output_.resize(static_cast<std::size_t>(whole_));
    run = [this] { communicator_.gather({segment_.get(), 0, share_bytes(), raw(output_), "bench"}); };
    check = [this] { return wrong(output_, [this](std::int64_t i) { return gathered(i); }); };
  }
  void prepare_reduce() {
    fill_segment(whole_);
    output_.resize(static_cast<std::size_t>(share_));
    places_.assign(static_cast<std::size_t>(ranks()),
                   {.source = segment_.get(), .offset = static_cast<std::size_t>(rank()) * share_bytes()});
    run = [this] {
      communicator_.reduce({.inputs = places_, .numel = share_, .output = raw(output_), .label = "bench"});
    };
    check = [this] { return wrong(output_, [this](std::int64_t i) { return reduced(i); }); };
  }
  void prepare_all_gather() {
    fill_input(share_);
    output_.resize(static_cast<std::size_t>(whole_));
    run = [this] {
      communicator_.all_gather(std::as_bytes(std::span(input_)), std::as_writable_bytes(std::span(output_)));
    };
    check = [this] { return wrong(output_, [this](std::int64_t i) { return gathered(i); }); };
  }
  void prepare_reduce_scatter() {
    fill_input(whole_);
    output_.resize(static_cast<std::size_t>(share_));
    run = [this] { communicator_.reduce_scatter(raw(input_), raw(output_), share_, DType::kFloat32); };
    check = [this] { return wrong(output_, [this](std::int64_t i) { return reduced(i); }); };
  }
  void prepare_all_reduce() {
    fill_input(whole_);
    run = [this] { communicator_.all_reduce(raw(input_), whole_, DType::kFloat32, ReduceOp::kMax); };
    check = [this] { return wrong(input_, [this](std::int64_t i) { return value_of(ranks() - 1, i); }); };
  }
  void prepare_broadcast() {
    fill_input(whole_);
    run = [this] { communicator_.broadcast(std::as_writable_bytes(std::span(input_)), 0); };
    check = [this] { return wrong(input_, [](std::int64_t i) { return value_of(0, i); }); };
  }

  Communicator& communicator_;
  const std::int64_t share_, whole_;
  std::vector<float> input_, output_;
  std::unique_ptr<Segment> segment_;
  std::vector<ReduceInput> places_;
};

struct Row {
  std::string operation;
  std::size_t bytes = 0;
  int iterations = 0;
  double seconds = 0;  // of one call, on the slowest rank
  std::int64_t wrong = 0;

  double algorithm_bandwidth() const { return seconds > 0 ? static_cast<double>(bytes) / seconds * 1e-9 : 0; }
  // What crosses the slowest link in each direction: comparable between operations and world sizes (nccl-tests,
  // doc/PERFORMANCE.md).
  double bus_bandwidth(int ranks) const {
    const double part = static_cast<double>(ranks - 1) / ranks;
    if (operation == "broadcast") return algorithm_bandwidth();
    return algorithm_bandwidth() * (operation == "all_reduce" ? 2 * part : part);
  }
};

double seconds_since(Clock::time_point begin) { return std::chrono::duration<double>(Clock::now() - begin).count(); }

template <class T>
T fold(Communicator& communicator, T value, DType dtype, ReduceOp op) {
  communicator.all_reduce(reinterpret_cast<std::byte*>(&value), 1, dtype, op);
  return value;
}

double slowest(Communicator& communicator, double seconds) {
  return fold(communicator, seconds, DType::kFloat64, ReduceOp::kMax);
}

double timed(Communicator& communicator, int iterations, const std::function<void()>& run) {
  communicator.barrier();
  const auto begin = Clock::now();
  for (int i = 0; i < iterations; ++i) run();
  const double seconds = seconds_since(begin) / iterations;
  communicator.barrier();
  return slowest(communicator, seconds);
}

Row measure(Communicator& communicator, const std::string& operation, std::size_t bytes, const BenchOptions& options) {
  const auto ranks = static_cast<std::size_t>(communicator.world_size());
  Exchange exchange(communicator, static_cast<std::int64_t>(bytes / sizeof(float) / ranks));
  exchange.prepare(operation);
  exchange.run();
  communicator.barrier();
  Row row{.operation = operation, .bytes = static_cast<std::size_t>(exchange.whole_numel()) * sizeof(float)};
  row.wrong = fold(communicator, exchange.check(), DType::kInt64, ReduceOp::kSum);
  const double once = timed(communicator, 1, exchange.run);
  row.iterations = options.iterations != 0
                       ? options.iterations
                       : static_cast<int>(std::clamp(kTargetSeconds / std::max(once, 1e-9), 3.0, 1000.0));
  row.seconds = timed(communicator, row.iterations, exchange.run);
  row.wrong += fold(communicator, exchange.check(), DType::kInt64, ReduceOp::kSum);
  return row;
}

// Bytes per second that one thread of each rank copies, all ranks at once; what is read and written counts once.
double copy_bandwidth(Communicator& communicator) {
  std::vector<std::byte> from(kCopyBytes, std::byte{1}), to(kCopyBytes, std::byte{2});
  return static_cast<double>(kCopyBytes) /
         timed(communicator, 3, [&] { stream_copy(to.data(), from.data(), kCopyBytes); });
}

void require_options(const BenchOptions& options, int ranks) {
  const std::size_t smallest = sizeof(float) * static_cast<std::size_t>(ranks);
  if (options.begin < 1 || options.end < options.begin || options.end < smallest || options.factor < 2) {
    throw InvalidArgument(
        fmt::format("expected sizes from 1 byte on, the last at least the first and {} bytes (a "
                    "float of each rank), and a factor of at least 2, got {} to {} by {}",
                    smallest, options.begin, options.end, options.factor));
  }
  for (const std::string& operation : options.operations) {
    if (std::find(std::begin(kBenchOperations), std::end(kBenchOperations), operation) != std::end(kBenchOperations))
      continue;
    throw InvalidArgument(
        fmt::format("expected operations among {}, got \"{}\"", fmt::join(kBenchOperations, ", "), operation));
  }
}

void print_head(const Context& context, double copy) {
  std::printf("# %d rank(s), backend %s (%s), fp32; a thread of each rank copies %.2f GB/s\n", context.world_size(),
              context.backend().c_str(), context.backend_reason().c_str(), copy * 1e-9);
  std::printf("# algbw: size / time; busbw: what crosses a link, as in nccl-tests; sizes are of the larger buffer\n");
  std::printf("%14s %12s %8s %12s %8s %8s %8s\n", "operation", "size(B)", "calls", "time(us)", "algbw", "busbw",
              "#wrong");
}

void print_row(const Row& row, int ranks) {
  std::printf("%14s %12zu %8d %12.2f %8.3f %8.3f %8lld\n", row.operation.c_str(), row.bytes, row.iterations,
              row.seconds * 1e6, row.algorithm_bandwidth(), row.bus_bandwidth(ranks),
              static_cast<long long>(row.wrong));
  std::fflush(stdout);
}

nlohmann::ordered_json to_json(const Row& row, int ranks) {
  return {{"operation", row.operation},
          {"bytes", row.bytes},
          {"calls", row.iterations},
          {"seconds", row.seconds},
          {"algbw", row.algorithm_bandwidth()},
          {"busbw", row.bus_bandwidth(ranks)},
          {"wrong", row.wrong}};
}

}  // namespace

std::int64_t count_wrong_exchanges(const Context& context, std::size_t bytes) {
  Communicator& communicator = context.communicator();
  const auto ranks = static_cast<std::size_t>(context.world_size());
  std::int64_t wrong = 0;
  for (const char* operation : kBenchOperations) {
    Exchange exchange(communicator, static_cast<std::int64_t>(bytes / sizeof(float) / ranks));
    exchange.prepare(operation);
    exchange.run();
    communicator.barrier();
    wrong += fold(communicator, exchange.check(), DType::kInt64, ReduceOp::kSum);
  }
  return wrong;
}

std::int64_t bench_comm(Context context, const BenchOptions& options) {
  Communicator& communicator = context.communicator();
  require_options(options, context.world_size());
  const double copy = copy_bandwidth(communicator);
  const bool prints = context.is_main() && !options.json;
  if (prints) print_head(context, copy);
  std::vector<std::string> operations = options.operations;
  if (operations.empty()) operations.assign(std::begin(kBenchOperations), std::end(kBenchOperations));
  auto rows = nlohmann::ordered_json::array();
  std::int64_t wrong = 0;
  for (const std::string& operation : operations) {
    const std::size_t smallest = sizeof(float) * static_cast<std::size_t>(context.world_size());
    std::size_t last = 0;
    for (std::size_t bytes = options.begin; bytes <= options.end; bytes *= static_cast<std::size_t>(options.factor)) {
      const std::size_t size = std::max(bytes, smallest);
      if (size == last) continue;
      last = size;
      const Row row = measure(communicator, operation, size, options);
      wrong += row.wrong;
      if (prints) print_row(row, context.world_size());
      rows.push_back(to_json(row, context.world_size()));
    }
  }
  if (context.is_main() && options.json) {
    const nlohmann::ordered_json report{{"world_size", context.world_size()},
                                        {"backend", context.backend()},
                                        {"copy_bandwidth", copy * 1e-9},
                                        {"rows", rows}};
    std::printf("%s\n", report.dump(2).c_str());
  }
  return wrong;
}

}  // namespace fsdp
