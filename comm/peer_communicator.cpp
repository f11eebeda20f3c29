#include "comm/peer_communicator.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <exception>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include <fsdp/error.h>

#include "comm/stream_copy.h"

namespace fsdp {
namespace {

class PeerSegment final : public Segment {
 public:
  PeerSegment(std::shared_ptr<const PeerRegion> region, int rank)
      : Segment({region->parts[static_cast<std::size_t>(rank)], region->bytes}), region_(std::move(region)) {}
  const PeerRegion& region() const { return *region_; }

 private:
  std::shared_ptr<const PeerRegion> region_;
};

const PeerRegion& region_of(const Segment& segment) { return static_cast<const PeerSegment&>(segment).region(); }

std::vector<std::atomic<std::uint64_t>*> words_of(const PeerRegion& region) {
  std::vector<std::atomic<std::uint64_t>*> parts;
  for (std::byte* part : region.parts) parts.push_back(reinterpret_cast<std::atomic<std::uint64_t>*>(part));
  return parts;
}

class PeerBoard final : public Board {
 public:
  PeerBoard(PeerMemory& memory, std::shared_ptr<const PeerRegion> region, int rank)
      : Board(words_of(*region)), memory_(memory), region_(std::move(region)), rank_(rank) {}

  void post(int index, std::span<const std::uint64_t> words) override {
    for (std::size_t i = 0; i < words.size(); ++i) part(rank_)[index + static_cast<int>(i)].store(words[i]);
    memory_.control().doorbell.ring();
    memory_.announce_words(*region_, index, words);
  }

 private:
  PeerMemory& memory_;
  std::shared_ptr<const PeerRegion> region_;
  const int rank_;
};

std::uint32_t detail_of(DType dtype, ReduceOp op) {
  return static_cast<std::uint32_t>(dtype) | static_cast<std::uint32_t>(op) << 8;
}

std::string describe(const Call& call) {
  std::string text = fmt::format("{} of {} bytes", name_of(call.operation), call.bytes);
  if (call.operation == Operation::kBroadcast) text += fmt::format(" from rank {}", call.detail);
  if (call.operation == Operation::kReduceScatter || call.operation == Operation::kAllReduce) {
    constexpr const char* kOps[] = {"sum", "max", "min"};
    text += fmt::format(" ({} {})", name_of(static_cast<DType>(call.detail & 0xff)), kOps[call.detail >> 8]);
  }
  return text;
}

template <class... Args>
void require(bool holds, int rank, fmt::format_string<Args...> text, Args&&... args) {
  if (holds) return;
  throw InvalidArgument(fmt::format("{} (rank {})", fmt::format(text, std::forward<Args>(args)...), rank), rank);
}

// Tells the peers' memory when this rank comes out of a collective, however it does.
class Collective {
 public:
  Collective(PeerMemory& memory, FlightRecorder& recorder, Operation operation, std::size_t bytes)
      : memory_(memory), recorded_(recorder, {operation}, bytes) {}
  ~Collective() { memory_.end_collective(); }
  Collective(const Collective&) = delete;
  Collective& operator=(const Collective&) = delete;

 private:
  PeerMemory& memory_;
  const FlightRecorder::Call recorded_;
};

// The errno of a step that may fail on this rank alone; 0 if it did not.
template <class Step>
int error_of(const Step& step) {
  try {
    step();
    return 0;
  } catch (const std::system_error& error) {
    return error.code().value();
  } catch (const std::bad_alloc&) {
    return ENOMEM;
  }
}

}  // namespace

PeerCommunicator::PeerCommunicator(std::unique_ptr<PeerMemory> memory, const Options& options)
    : backend_(options.backend),
      owner_(::getpid()),
      exceptions_(std::uncaught_exceptions()),
      memory_(std::move(memory)),
      group_(*memory_, options.rank, options.timeout),
      reader_(*memory_, group_) {}

PeerCommunicator::~PeerCommunicator() {
  if (::getpid() != owner_ || dead_) return;
  if (std::uncaught_exceptions() > exceptions_)
    group_.abort("an exception ended this rank's part of the program; see its own output");
  group_.leave();
}

std::uint64_t PeerCommunicator::meet(const Call& call, int error) {
  group_.throw_if_aborted({call.operation});  // before the half of a meeting that a peer may still read is written over
  const std::uint64_t meeting = group_.next_meeting();
  RankSlot& slot = group_.control().slot(rank());
  slot.calls[meeting % 2] = call;
  slot.errors[meeting % 2] = error;
  group_.meet(call.operation);
  throw_if_calls_differ(meeting);
  return meeting;
}

void PeerCommunicator::throw_if_calls_differ(std::uint64_t meeting) {
  const Call& first = group_.control().slot(0).calls[meeting % 2];
  for (int peer = 1; peer < world_size(); ++peer) {
    const Call& other = group_.control().slot(peer).calls[meeting % 2];
    if (other == first) continue;
    throw InvalidArgument(
        fmt::format("collective calls differ: rank 0 is in {}, rank {} in {} (seen on rank {}); every rank must "
                    "make the same calls in the same order",
                    describe(first), peer, describe(other), rank()),
        peer);
  }
}

void PeerCommunicator::meet_after(const Call& call, int error) {
  const std::uint64_t meeting = meet(call, error);
  for (int peer = 0; peer < world_size(); ++peer) {
    const int status = group_.control().slot(peer).errors[meeting % 2];
    if (status == 0) continue;
    throw MemoryError(
        fmt::format("allocate of {} bytes per rank failed on rank {}: {}; free memory or shard over more ranks",
                    call.bytes, peer, std::generic_category().message(status)),
        peer);
  }
}

std::shared_ptr<const PeerRegion> PeerCommunicator::allocate_region(const Call& call, const Collect& collect) {
  const Collective scope(*memory_, group_.recorder(), call.operation, call.bytes);
  meet(call);
  meet_after(call, error_of([&] {
               if (rank() == 0) memory_->offer(call.bytes);
             }));
  std::shared_ptr<const PeerRegion> region;
  meet_after(call, error_of([&] {
               region = collect(call.bytes);
               if (allocation_fails_.exchange(false)) throw std::bad_alloc();
               populate({region->parts[static_cast<std::size_t>(rank())], call.bytes});
             }));
  return region;
}

std::unique_ptr<Segment> PeerCommunicator::allocate(std::size_t bytes) {
  return std::make_unique<PeerSegment>(
      allocate_region({Operation::kAllocate, 0, bytes}, [this](std::size_t part) { return memory_->collect(part); }),
      rank());
}

std::unique_ptr<Board> PeerCommunicator::allocate_board(int words) {
  const std::size_t bytes = static_cast<std::size_t>(words) * sizeof(std::uint64_t);
  return std::make_unique<PeerBoard>(*memory_,
                                     allocate_region({Operation::kAllocateBoard, 0, bytes},
                                                     [this](std::size_t part) { return memory_->collect_board(part); }),
                                     rank());
}

void PeerCommunicator::all_gather(std::span<const std::byte> input, std::span<std::byte> output) {
  const Collective scope(*memory_, group_.recorder(), Operation::kAllGather, input.size());
  const auto ranks = static_cast<std::size_t>(world_size());
  require(output.size() == ranks * input.size(), rank(),
          "all_gather: expected an output of {} bytes ({} ranks times the input), got {}", ranks * input.size(), ranks,
          output.size());
  const auto part = [&](int peer) { return output.data() + static_cast<std::size_t>(peer) * input.size(); };
  if (!input.empty() && part(rank()) != input.data()) stream_copy(part(rank()), input.data(), input.size());
  std::size_t done = 0;
  do {
    const std::size_t bytes = std::min(kStagingBytes, input.size() - done);
    if (bytes != 0) std::memcpy(own_staging(Operation::kAllGather), input.data() + done, bytes);
    const std::uint64_t meeting = meet({Operation::kAllGather, 0, input.size()});
    std::vector<PeerCopy> copies;
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank()) copies.push_back(staged(peer, meeting, {part(peer) + done, bytes}));
    }
    reader_.copy(copies, {Operation::kAllGather});
    done += bytes;
  } while (done < input.size());
}

void PeerCommunicator::reduce_scatter(const std::byte* input, std::byte* output, std::int64_t numel, DType dtype) {
  const Collective scope(*memory_, group_.recorder(), Operation::kReduceScatter, bytes_of(numel, dtype));
  require(numel >= 0, rank(), "reduce_scatter: expected numel >= 0, got {}", numel);
  const Call call{Operation::kReduceScatter, detail_of(dtype, ReduceOp::kSum), bytes_of(numel, dtype)};
  const auto chunk_numel = static_cast<std::int64_t>(kStagingBytes / size_of(dtype)) / world_size();
  std::int64_t done = 0;
  do {
    const std::int64_t chunk = std::min(chunk_numel, numel - done);
    const std::size_t bytes = bytes_of(chunk, dtype);
    for (int share = 0; share < world_size() && bytes != 0; ++share) {
      std::memcpy(own_staging(Operation::kReduceScatter) + static_cast<std::size_t>(share) * bytes,
                  input + bytes_of(share * numel + done, dtype), bytes);
    }
    const std::uint64_t meeting = meet(call);
    fold_staged(call, meeting, static_cast<std::size_t>(rank()) * bytes,
                {{}, chunk, dtype, ReduceOp::kSum, output + bytes_of(done, dtype)});
    done += chunk;
  } while (done < numel);
}

void PeerCommunicator::all_reduce(std::byte* data, std::int64_t numel, DType dtype, ReduceOp op) {
  const Collective scope(*memory_, group_.recorder(), Operation::kAllReduce, bytes_of(numel, dtype));
  require(numel >= 0, rank(), "all_reduce: expected numel >= 0, got {}", numel);
  const Call call{Operation::kAllReduce, detail_of(dtype, op), bytes_of(numel, dtype)};
  const auto chunk_numel = static_cast<std::int64_t>(kStagingBytes / size_of(dtype));
  std::int64_t done = 0;
  do {
    const std::int64_t chunk = std::min(chunk_numel, numel - done);
    fold_chunk(call, data + bytes_of(done, dtype), chunk, op, dtype);
    done += chunk;
  } while (done < numel);
}

// Each rank folds its slice of the chunk and publishes the result in the half of the second meeting.
void PeerCommunicator::fold_chunk(const Call& call, std::byte* data, std::int64_t numel, ReduceOp op, DType dtype) {
  const auto begin_of = [&](int slice) { return numel * slice / world_size(); };
  if (numel != 0) std::memcpy(own_staging(call.operation), data, bytes_of(numel, dtype));
  const std::uint64_t gathered = meet(call);
  const std::size_t own = bytes_of(begin_of(rank()), dtype);
  fold_staged(call, gathered, own,
              {{}, begin_of(rank() + 1) - begin_of(rank()), dtype, op, own_staging(call.operation) + own});
  const std::uint64_t folded = meet(call);
  std::vector<PeerCopy> copies;
  for (int peer = 0; peer < world_size(); ++peer) {
    const std::size_t begin = bytes_of(begin_of(peer), dtype), end = bytes_of(begin_of(peer + 1), dtype);
    copies.push_back(staged(peer, folded, {data + begin, end - begin}, begin));
  }
  reader_.copy(copies, {call.operation});
}

// Folds what each rank has staged at `offset`.
void PeerCommunicator::fold_staged(const Call& call, std::uint64_t meeting, std::size_t offset,
                                   const OrderedFold& fold) {
  std::vector<PeerInput> inputs;
  for (int peer = 0; peer < world_size(); ++peer)
    inputs.push_back({&memory_->staging(), peer, half_of(meeting) + offset});
  reader_.for_each_piece(
      inputs, fold.numel, size_of(fold.dtype), {call.operation},
      [&](std::int64_t first, std::int64_t numel, std::span<const std::byte* const> pieces) {
        ordered_fold({pieces, numel, fold.dtype, fold.op, fold.output + bytes_of(first, fold.dtype)});
      });
}

void PeerCommunicator::broadcast(std::span<std::byte> data, int root) {
  const Collective scope(*memory_, group_.recorder(), Operation::kBroadcast, data.size());
  require(root >= 0 && root < world_size(), rank(), "broadcast: expected a root in [0, {}), got {}", world_size(),
          root);
  std::size_t done = 0;
  do {
    const std::size_t bytes = std::min(kStagingBytes, data.size() - done);
    if (rank() == root && bytes != 0) std::memcpy(own_staging(Operation::kBroadcast), data.data() + done, bytes);
    const std::uint64_t meeting = meet({Operation::kBroadcast, static_cast<std::uint32_t>(root), data.size()});
    if (rank() != root) {
      const PeerCopy copy = staged(root, meeting, data.subspan(done, bytes));
      reader_.copy({&copy, 1}, {Operation::kBroadcast});
    }
    done += bytes;
  } while (done < data.size());
}

void PeerCommunicator::barrier() {
  const Collective scope(*memory_, group_.recorder(), Operation::kBarrier, 0);
  meet({Operation::kBarrier, 0, 0});
}

void PeerCommunicator::gather(const GatherRequest& request) {
  const Activity activity{Operation::kGather, request.label};
  const FlightRecorder::Call recorded(group_.recorder(), activity, request.shard_bytes);
  group_.enter(activity);
  require(request.source != nullptr, rank(), "gather of {}: source is null", request.label);
  const std::size_t held = request.source->bytes();
  const int ranks = request.ranks != 0 ? request.ranks : world_size();
  const std::size_t span = request.shard_bytes + request.stride * static_cast<std::size_t>(std::max(ranks, 1) - 1);
  require(request.offset <= held && span <= held - request.offset, rank(),
          "gather of {}: expected a range within the {} bytes of a shard, got {} bytes at {}", request.label, held,
          span, request.offset);
  require(request.first_rank >= 0 && ranks > 0 && request.first_rank <= world_size() - ranks, rank(),
          "gather of {}: expected owners among {} ranks, got {} from rank {} on", request.label, world_size(), ranks,
          request.first_rank);
  // Starting at a different owner on each rank spreads the readers over the owners' memory.
  std::vector<PeerCopy> copies;
  for (int i = 0; i < ranks; ++i) {
    const auto owner = static_cast<std::size_t>((rank() + i) % ranks);
    copies.push_back({&region_of(*request.source),
                      request.first_rank + static_cast<int>(owner),
                      request.offset + owner * request.stride,
                      {request.output + owner * request.shard_bytes, request.shard_bytes}});
  }
  reader_.copy(copies, activity);
}

void PeerCommunicator::reduce(const ReduceRequest& request) {
  const Activity activity{Operation::kReduce, request.label};
  const std::size_t bytes = bytes_of(request.numel, request.input_dtype);
  const FlightRecorder::Call recorded(group_.recorder(), activity, bytes);
  group_.enter(activity);
  require(static_cast<int>(request.inputs.size()) == world_size() && request.numel >= 0 && request.divisor > 0, rank(),
          "reduce of {}: expected {} inputs, numel >= 0 and divisor > 0, got {}, {} and {}", request.label,
          world_size(), request.inputs.size(), request.numel, request.divisor);
  std::vector<PeerInput> inputs;
  for (const ReduceInput& input : request.inputs) {
    const PeerRegion* region = input.source == nullptr ? nullptr : &region_of(*input.source);
    require(region == nullptr || (input.offset <= region->bytes && bytes <= region->bytes - input.offset), rank(),
            "reduce of {}: expected a range within the {} bytes of a segment, got {} bytes at {}", request.label,
            region == nullptr ? 0 : region->bytes, bytes, input.offset);
    inputs.push_back({region, static_cast<int>(inputs.size()), input.offset, input.local});
  }
  const std::size_t output_bytes = reduced_size_of(request.input_dtype);
  reader_.for_each_piece(inputs, request.numel, size_of(request.input_dtype), activity,
                         [&](std::int64_t first, std::int64_t numel, std::span<const std::byte* const> pieces) {
                           ordered_sum({.inputs = pieces,
                                        .numel = numel,
                                        .input_dtype = request.input_dtype,
                                        .output = request.output + static_cast<std::size_t>(first) * output_bytes,
                                        .accumulate = request.accumulate,
                                        .in_order = request.in_order,
                                        .divisor = request.divisor});
                         });
}

void PeerCommunicator::read(const Segment& source, int peer, std::size_t offset, std::span<std::byte> output) {
  const FlightRecorder::Call recorded(group_.recorder(), {Operation::kRead}, output.size());
  group_.enter({Operation::kRead});
  require(peer >= 0 && peer < world_size(), rank(), "read: expected a rank in [0, {}), got {}", world_size(), peer);
  require(offset <= source.bytes() && output.size() <= source.bytes() - offset, rank(),
          "read: expected a range within the {} bytes of rank {}'s part, got {} bytes at {}", source.bytes(), peer,
          output.size(), offset);
  const PeerCopy copy{&region_of(source), peer, offset, output};
  reader_.copy({&copy, 1}, {Operation::kRead});
}

void PeerCommunicator::wait_until(const std::function<bool()>& ready, std::string_view what) {
  const FlightRecorder::Call recorded(group_.recorder(), {Operation::kWaitUntil, what}, 0);
  group_.wait_until(ready, what);
}

void PeerCommunicator::ring() { group_.control().doorbell.ring(); }

void PeerCommunicator::abort(const std::string& reason) noexcept { group_.abort(reason); }

void PeerCommunicator::die() {
  memory_->die();
  dead_ = true;
}

void PeerCommunicator::report_progress(const Progress& progress) { group_.report_progress(progress); }

void PeerCommunicator::check() { group_.check({Operation::kCheck}); }

}  // namespace fsdp
