#include "comm/recording_communicator.h"

#include <algorithm>
#include <thread>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "comm/ordered_sum.h"

namespace fsdp {
namespace {

std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

bool gives_bytes(Operation operation) {
  switch (operation) {
    case Operation::kAllGather:
    case Operation::kReduceScatter:
    case Operation::kAllReduce:
    case Operation::kBroadcast:
    case Operation::kGather:
    case Operation::kReduce:
    case Operation::kRead: return true;
    default: return false;
  }
}

// Which calls a fault of this kind can happen in.
bool can_hit(Fault::Kind kind, Operation operation) {
  if (operation == Operation::kNone || operation == Operation::kCheck) return false;  // not recorded
  switch (kind) {
    case Fault::Kind::kCorruption: return gives_bytes(operation);
    case Fault::Kind::kNoMemory: return operation == Operation::kAllocate || operation == Operation::kAllocateBoard;
    default: return true;
  }
}

std::vector<std::string_view> operations_of(Fault::Kind kind) {
  std::vector<std::string_view> names;
  for (auto id = static_cast<std::uint32_t>(Operation::kNone); id <= static_cast<std::uint32_t>(Operation::kCheck);
       ++id) {
    if (can_hit(kind, static_cast<Operation>(id))) names.push_back(name_of(static_cast<Operation>(id)));
  }
  return names;
}

bool contains(const std::vector<std::string_view>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

void check_faults(const FaultPlan& faults, int world_size) {
  constexpr const char* kKinds[] = {"kDelay", "kThrow", "kDeath", "kCorruption", "kNoMemory"};
  for (const Fault& fault : faults) {
    const std::string_view kind = kKinds[static_cast<int>(fault.kind)];
    const auto names = operations_of(fault.kind);
    if (!fault.operation.empty() && !contains(names, fault.operation)) {
      throw InvalidArgument(
          fmt::format("Fault::operation: expected one of {} for {}, or \"\" for any of them, got \"{}\"",
                      fmt::join(names, ", "), kind, fault.operation));
    }
    if (fault.rank < -1 || fault.rank >= world_size) {
      throw InvalidArgument(
          fmt::format("Fault::rank: expected -1 (every rank) or one in [0, {}), got {}", world_size, fault.rank));
    }
    if (fault.after < 0 || (fault.count < 1 && fault.count != -1) || fault.delay.count() < 0) {
      throw InvalidArgument(
          fmt::format("Fault: expected after >= 0, count >= 1 or -1 and delay >= 0, got {}, {} and {} ms", fault.after,
                      fault.count, fault.delay.count()));
    }
  }
}

RecordingCommunicator::RecordingCommunicator(std::shared_ptr<PeerCommunicator> inner, FaultPlan faults,
                                             OnRecord on_record)
    : inner_(std::move(inner)), faults_(std::move(faults)), on_record_(std::move(on_record)), matches_(faults_.size()) {
  for (const Fault& fault : faults_) operations_.push_back(operations_of(fault.kind));
}

template <class Body>
void RecordingCommunicator::run(CommunicatorRecord record, const Body& body) {
  record.begin_ns = now_ns();
  bool corrupts = false;
  for (std::size_t i = 0; i < faults_.size(); ++i) {
    const std::optional<int> match = hit(i, record);
    if (!match) continue;
    apply_before(faults_[i], *match, record);
    corrupts |= faults_[i].kind == Fault::Kind::kCorruption;
  }
  body();
  if (corrupts && record.bytes != 0 && record.output != nullptr)
    *static_cast<std::byte*>(const_cast<void*>(record.output)) ^= std::byte{1};
  record.end_ns = now_ns();
  if (on_record_) on_record_(rank(), record);
}

std::optional<int> RecordingCommunicator::hit(std::size_t index, const CommunicatorRecord& record) {
  const Fault& fault = faults_[index];
  if (fault.operation.empty() ? !contains(operations_[index], record.operation) : fault.operation != record.operation)
    return std::nullopt;
  if (fault.rank != -1 && fault.rank != rank()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  const int match = matches_[index]++;
  const bool is_hit = match >= fault.after && (fault.count == -1 || match < fault.after + fault.count);
  return is_hit ? std::optional(match) : std::nullopt;
}

void RecordingCommunicator::apply_before(const Fault& fault, int match, const CommunicatorRecord& record) {
  const std::string what = fmt::format("injected fault in {}{}{} on rank {}, matching call {}", record.operation,
                                       record.label.empty() ? "" : " of ", record.label, rank(), match);
  switch (fault.kind) {
    case Fault::Kind::kDelay: std::this_thread::sleep_for(fault.delay); return;
    case Fault::Kind::kThrow: throw CommunicationError(what, rank());
    case Fault::Kind::kDeath: inner_->die(); throw CommunicationError(what + ": it is dead", rank());
    case Fault::Kind::kNoMemory: inner_->fail_next_allocation(); return;
    case Fault::Kind::kCorruption: return;
  }
}

std::unique_ptr<Segment> RecordingCommunicator::allocate(std::size_t bytes) {
  std::unique_ptr<Segment> segment;
  run({.operation = "allocate", .bytes = bytes}, [&] { segment = inner_->allocate(bytes); });
  return segment;
}

std::unique_ptr<Board> RecordingCommunicator::allocate_board(int words) {
  std::unique_ptr<Board> board;
  run({.operation = "allocate_board", .bytes = static_cast<std::size_t>(words) * sizeof(std::uint64_t)},
      [&] { board = inner_->allocate_board(words); });
  return board;
}

void RecordingCommunicator::all_gather(std::span<const std::byte> input, std::span<std::byte> output) {
  run({.operation = "all_gather", .bytes = output.size(), .output = output.data()},
      [&] { inner_->all_gather(input, output); });
}

void RecordingCommunicator::reduce_scatter(const std::byte* input, std::byte* output, std::int64_t numel, DType dtype) {
  run({.operation = "reduce_scatter", .bytes = bytes_of(numel, dtype), .output = output},
      [&] { inner_->reduce_scatter(input, output, numel, dtype); });
}

void RecordingCommunicator::all_reduce(std::byte* data, std::int64_t numel, DType dtype, ReduceOp op) {
  run({.operation = "all_reduce", .bytes = bytes_of(numel, dtype), .output = data},
      [&] { inner_->all_reduce(data, numel, dtype, op); });
}

void RecordingCommunicator::broadcast(std::span<std::byte> data, int root) {
  run({.operation = "broadcast", .bytes = rank() == root ? 0 : data.size(), .output = data.data()},
      [&] { inner_->broadcast(data, root); });
}

void RecordingCommunicator::barrier() {
  run({.operation = "barrier"}, [&] { inner_->barrier(); });
}

void RecordingCommunicator::gather(const GatherRequest& request) {
  const int ranks = request.ranks != 0 ? request.ranks : world_size();
  const std::size_t bytes = request.shard_bytes * static_cast<std::size_t>(ranks);
  run({.operation = "gather", .label = std::string(request.label), .bytes = bytes, .output = request.output},
      [&] { inner_->gather(request); });
}

void RecordingCommunicator::reduce(const ReduceRequest& request) {
  const std::size_t bytes = static_cast<std::size_t>(request.numel) * reduced_size_of(request.input_dtype);
  run({.operation = "reduce", .label = std::string(request.label), .bytes = bytes, .output = request.output},
      [&] { inner_->reduce(request); });
}

void RecordingCommunicator::read(const Segment& source, int rank, std::size_t offset, std::span<std::byte> output) {
  run({.operation = "read", .bytes = output.size(), .output = output.data()},
      [&] { inner_->read(source, rank, offset, output); });
}

void RecordingCommunicator::wait_until(const std::function<bool()>& ready, std::string_view what) {
  run({.operation = "wait_until", .label = std::string(what)}, [&] { inner_->wait_until(ready, what); });
}

}  // namespace fsdp
