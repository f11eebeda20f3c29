#include "comm/peer_communicator.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <limits>
#include <system_error>
#include <vector>

#include <fmt/format.h>
#include <unistd.h>

#include <fsdp/error.h>

#include "comm/ordered_sum.h"
#include "comm/stream_copy.h"

namespace fsdp {
namespace {

class PeerSegment final : public Segment {
 public:
  PeerSegment(int rank, std::shared_ptr<const MappedMemory> memory, std::size_t bytes)
      : Segment(rank), memory_(std::move(memory)), bytes_(bytes), stride_(round_up_to_page(bytes)) {}
  std::span<std::byte> peer(int rank) const override {
    return memory_->span().subspan(static_cast<std::size_t>(rank) * stride_, bytes_);
  }

 private:
  std::shared_ptr<const MappedMemory> memory_;
  std::size_t bytes_, stride_;
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

void require(bool holds, int rank, const std::string& message) {
  if (!holds) throw InvalidArgument(fmt::format("{} (rank {})", message, rank), rank);
}

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
      group_(*memory_, options.rank, options.timeout) {}

PeerCommunicator::~PeerCommunicator() {
  if (::getpid() != owner_) return;
  if (std::uncaught_exceptions() > exceptions_)
    group_.abort("an exception ended this rank's part of the program; see its own output");
  group_.leave();
}

std::uint64_t PeerCommunicator::meet(const Call& call, int status) {
  group_.throw_if_aborted({call.operation});  // before the half of a meeting that a peer may still read is written over
  const std::uint64_t meeting = group_.next_meeting();
  RankSlot& slot = group_.control().slot(rank());
  slot.calls[meeting % 2] = call;
  slot.status[meeting % 2] = status;
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
    const int status = group_.control().slot(peer).status[meeting % 2];
    if (status == 0) continue;
    throw MemoryError(
        fmt::format("allocate of {} bytes per rank failed on rank {}: {}; free memory or shard over more ranks",
                    call.bytes, peer, std::generic_category().message(status)),
        peer);
  }
}

// One mapping holds all parts: | rank 0 |pad| rank 1 |pad| ...; each starts on a page, and its own rank touches it first.
std::unique_ptr<Segment> PeerCommunicator::allocate(std::size_t bytes) {
  const Call call{Operation::kAllocate, 0, bytes};
  meet(call);
  const auto ranks = static_cast<std::size_t>(world_size());
  const bool fits = bytes <= std::numeric_limits<std::size_t>::max() / ranks / 2;
  const std::size_t stride = fits ? round_up_to_page(bytes) : 0;
  meet_after(call, !fits ? ENOMEM : error_of([&] {
               if (rank() == 0) memory_->offer(stride * ranks);
             }));
  std::shared_ptr<const MappedMemory> memory;
  meet_after(call, error_of([&] {
               memory = memory_->collect(stride * ranks);
               memory->populate(static_cast<std::size_t>(rank()) * stride, bytes);
             }));
  return std::make_unique<PeerSegment>(rank(), std::move(memory), bytes);
}

void PeerCommunicator::all_gather(std::span<const std::byte> input, std::span<std::byte> output) {
  const auto ranks = static_cast<std::size_t>(world_size());
  require(output.size() == ranks * input.size(), rank(),
          fmt::format("all_gather: expected an output of {} bytes ({} ranks times the input), got {}",
                      ranks * input.size(), ranks, output.size()));
  const auto part = [&](int peer) { return output.data() + static_cast<std::size_t>(peer) * input.size(); };
  if (!input.empty() && part(rank()) != input.data()) stream_copy(part(rank()), input.data(), input.size());
  std::size_t done = 0;
  do {
    const std::size_t bytes = std::min(kStagingBytes, input.size() - done);
    if (bytes != 0) std::memcpy(own_staging(Operation::kAllGather), input.data() + done, bytes);
    const std::uint64_t meeting = meet({Operation::kAllGather, 0, input.size()});
    for (int peer = 0; peer < world_size(); ++peer) {
      if (peer != rank()) stream_copy(part(peer) + done, staging(peer, meeting), bytes);
    }
    done += bytes;
  } while (done < input.size());
}

void PeerCommunicator::reduce_scatter(const std::byte* input, std::byte* output, std::int64_t numel, DType dtype) {
  require(numel >= 0, rank(), fmt::format("reduce_scatter: expected numel >= 0, got {}", numel));
  const Call call{Operation::kReduceScatter, detail_of(dtype, ReduceOp::kSum), bytes_of(numel, dtype)};
  const auto chunk_numel = static_cast<std::int64_t>(kStagingBytes / size_of(dtype)) / world_size();
  std::vector<const std::byte*> inputs(static_cast<std::size_t>(world_size()));
  std::int64_t done = 0;
  do {
    const std::int64_t chunk = std::min(chunk_numel, numel - done);
    const std::size_t bytes = bytes_of(chunk, dtype);
    for (int share = 0; share < world_size() && bytes != 0; ++share) {
      std::memcpy(own_staging(Operation::kReduceScatter) + static_cast<std::size_t>(share) * bytes,
                  input + bytes_of(share * numel + done, dtype), bytes);
    }
    const std::uint64_t meeting = meet(call);
    for (int peer = 0; peer < world_size(); ++peer) {
      inputs[static_cast<std::size_t>(peer)] = staging(peer, meeting) + static_cast<std::size_t>(rank()) * bytes;
    }
    ordered_fold({inputs, chunk, dtype, ReduceOp::kSum, output + bytes_of(done, dtype)});
    done += chunk;
  } while (done < numel);
}

void PeerCommunicator::all_reduce(std::byte* data, std::int64_t numel, DType dtype, ReduceOp op) {
  require(numel >= 0, rank(), fmt::format("all_reduce: expected numel >= 0, got {}", numel));
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
  std::vector<const std::byte*> inputs;
  for (int peer = 0; peer < world_size(); ++peer)
    inputs.push_back(staging(peer, gathered) + bytes_of(begin_of(rank()), dtype));
  ordered_fold({inputs, begin_of(rank() + 1) - begin_of(rank()), dtype, op,
                own_staging(call.operation) + bytes_of(begin_of(rank()), dtype)});
  const std::uint64_t folded = meet(call);
  for (int peer = 0; peer < world_size(); ++peer) {
    const std::size_t begin = bytes_of(begin_of(peer), dtype), end = bytes_of(begin_of(peer + 1), dtype);
    if (begin != end) std::memcpy(data + begin, staging(peer, folded) + begin, end - begin);
  }
}

void PeerCommunicator::broadcast(std::span<std::byte> data, int root) {
  require(root >= 0 && root < world_size(), rank(),
          fmt::format("broadcast: expected a root in [0, {}), got {}", world_size(), root));
  std::size_t done = 0;
  do {
    const std::size_t bytes = std::min(kStagingBytes, data.size() - done);
    if (rank() == root && bytes != 0) std::memcpy(own_staging(Operation::kBroadcast), data.data() + done, bytes);
    const std::uint64_t meeting = meet({Operation::kBroadcast, static_cast<std::uint32_t>(root), data.size()});
    if (rank() != root) stream_copy(data.data() + done, staging(root, meeting), bytes);
    done += bytes;
  } while (done < data.size());
}

void PeerCommunicator::barrier() { meet({Operation::kBarrier, 0, 0}); }

void PeerCommunicator::gather(const GatherRequest& request) {
  group_.throw_if_aborted({Operation::kGather, request.label});
  require(request.source != nullptr, rank(), fmt::format("gather of {}: source is null", request.label));
  const std::size_t held = request.source->bytes();
  const int ranks = request.ranks != 0 ? request.ranks : world_size();
  const std::size_t span = request.shard_bytes + request.stride * static_cast<std::size_t>(std::max(ranks, 1) - 1);
  require(request.offset <= held && span <= held - request.offset, rank(),
          fmt::format("gather of {}: expected a range within the {} bytes of a shard, got {} bytes at {}",
                      request.label, held, span, request.offset));
  require(request.first_rank >= 0 && ranks > 0 && request.first_rank <= world_size() - ranks, rank(),
          fmt::format("gather of {}: expected owners among {} ranks, got {} from rank {} on", request.label,
                      world_size(), ranks, request.first_rank));
  // Starting at a different owner on each rank spreads the readers over the owners' memory.
  for (int i = 0; i < ranks; ++i) {
    const auto owner = static_cast<std::size_t>((rank() + i) % ranks);
    std::byte* target = request.output + owner * request.shard_bytes;
    const std::byte* share = request.source->peer(request.first_rank + static_cast<int>(owner)).data() +
                             request.offset + owner * request.stride;
    if (target != share) stream_copy(target, share, request.shard_bytes);
  }
}

void PeerCommunicator::reduce(const ReduceRequest& request) {
  group_.throw_if_aborted({Operation::kReduce, request.label});
  require(static_cast<int>(request.inputs.size()) == world_size() && request.numel >= 0 && request.divisor > 0, rank(),
          fmt::format("reduce of {}: expected {} inputs, numel >= 0 and divisor > 0, got {}, {} and {}", request.label,
                      world_size(), request.inputs.size(), request.numel, request.divisor));
  ordered_sum(request);
}

void PeerCommunicator::read(const Segment& source, int peer, std::size_t offset, std::span<std::byte> output) {
  group_.throw_if_aborted({Operation::kRead});
  require(peer >= 0 && peer < world_size(), rank(),
          fmt::format("read: expected a rank in [0, {}), got {}", world_size(), peer));
  require(offset <= source.bytes() && output.size() <= source.bytes() - offset, rank(),
          fmt::format("read: expected a range within the {} bytes of rank {}'s part, got {} bytes at {}",
                      source.bytes(), peer, output.size(), offset));
  stream_copy(output.data(), source.peer(peer).data() + offset, output.size());
}

void PeerCommunicator::wait_until(const std::function<bool()>& ready, std::string_view what) {
  group_.wait_until(ready, what);
}

void PeerCommunicator::ring() { group_.control().doorbell.ring(); }

void PeerCommunicator::abort(const std::string& reason) noexcept { group_.abort(reason); }

void PeerCommunicator::check() { group_.check({Operation::kCheck}); }

}  // namespace fsdp
