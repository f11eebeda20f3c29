#include "comm/peer_reader.h"

#include <algorithm>
#include <array>

#include "comm/stream_copy.h"

namespace fsdp {
namespace {

// Of each input that is fetched; twice that per input is held. Large enough that a round trip hides behind it.
constexpr std::size_t kPieceBytes = std::size_t{256} << 10;

const std::byte* in_place(const PeerInput& input) {
  if (input.region == nullptr) return input.local;
  const std::byte* part = input.region->parts[static_cast<std::size_t>(input.rank)];
  return part == nullptr ? nullptr : part + input.offset;
}

// The pieces of a reduction: half of the scratch memory is read while the other is filled.
class Pieces {
 public:
  Pieces(PeerMemory& memory, std::span<const PeerInput> inputs, std::int64_t numel, std::size_t element_bytes)
      : memory_(memory), inputs_(inputs), numel_(numel), element_bytes_(element_bytes) {
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      if (inputs[i].region != nullptr && in_place(inputs[i]) == nullptr) fetched_.push_back(i);
    }
    if (fetched_.empty()) {
      piece_numel_ = std::max<std::int64_t>(numel, 1);
      return;
    }
    piece_numel_ = static_cast<std::int64_t>(kPieceBytes / element_bytes);
    half_bytes_ = fetched_.size() * static_cast<std::size_t>(std::min(piece_numel_, numel)) * element_bytes;
    scratch_.resize(2 * half_bytes_);
  }

  std::int64_t piece_numel() const { return piece_numel_; }

  // Null where nothing has to be fetched.
  std::unique_ptr<PeerMemory::Fetch> begin(std::int64_t first) {
    if (fetched_.empty() || first >= numel_) return nullptr;
    std::vector<PeerCopy> copies;
    for (std::size_t i = 0; i < fetched_.size(); ++i) {
      const PeerInput& input = inputs_[fetched_[i]];
      copies.push_back({input.region,
                        input.rank,
                        input.offset + static_cast<std::size_t>(first) * element_bytes_,
                        {target(i, first), piece_bytes(first)}});
    }
    return memory_.fetch(copies);
  }

  std::vector<const std::byte*> pointers(std::int64_t first) {
    std::vector<const std::byte*> pointers;
    for (const PeerInput& input : inputs_) {
      const std::byte* data = in_place(input);
      pointers.push_back(data == nullptr ? nullptr : data + static_cast<std::size_t>(first) * element_bytes_);
    }
    for (std::size_t i = 0; i < fetched_.size(); ++i) pointers[fetched_[i]] = target(i, first);
    return pointers;
  }

 private:
  std::size_t piece_bytes(std::int64_t first) const {
    return static_cast<std::size_t>(std::min(piece_numel_, numel_ - first)) * element_bytes_;
  }
  std::byte* target(std::size_t i, std::int64_t first) {
    return scratch_.data() + static_cast<std::size_t>(first / piece_numel_ % 2) * half_bytes_ + i * piece_bytes(first);
  }

  PeerMemory& memory_;
  std::span<const PeerInput> inputs_;
  const std::int64_t numel_;
  const std::size_t element_bytes_;
  std::vector<std::size_t> fetched_;
  std::int64_t piece_numel_ = 0;
  std::size_t half_bytes_ = 0;
  std::vector<std::byte> scratch_;
};

}  // namespace

void PeerReader::copy(std::span<const PeerCopy> copies, const Activity& activity) {
  const auto part = [](const PeerCopy& copy) { return copy.region->parts[static_cast<std::size_t>(copy.rank)]; };
  std::vector<PeerCopy> fetched;
  for (const PeerCopy& copy : copies) {
    if (part(copy) == nullptr && !copy.target.empty()) fetched.push_back(copy);
  }
  const std::unique_ptr<PeerMemory::Fetch> fetch = fetched.empty() ? nullptr : memory_.fetch(fetched);
  for (const PeerCopy& copy : copies) {
    if (part(copy) == nullptr || part(copy) + copy.offset == copy.target.data()) continue;
    stream_copy(copy.target.data(), part(copy) + copy.offset, copy.target.size());
  }
  if (fetch != nullptr) group_.wait_for(*fetch, activity);
}

void PeerReader::for_each_piece(std::span<const PeerInput> inputs, std::int64_t numel, std::size_t element_bytes,
                                const Activity& activity, const Body& body) {
  Pieces pieces(memory_, inputs, numel, element_bytes);
  std::unique_ptr<PeerMemory::Fetch> next = pieces.begin(0);
  for (std::int64_t first = 0; first < numel; first += pieces.piece_numel()) {
    const std::unique_ptr<PeerMemory::Fetch> current = std::move(next);
    if (current != nullptr) group_.wait_for(*current, activity);
    next = pieces.begin(first + pieces.piece_numel());
    body(first, std::min(pieces.piece_numel(), numel - first), pieces.pointers(first));
  }
}

}  // namespace fsdp
