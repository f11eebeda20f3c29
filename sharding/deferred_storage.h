// A tensor that has notes of how it is to be filled, and memory only while an operator reads it.
//
// NOTE [Deferred tensors]
// Such a tensor carries the touch key, so that the dispatcher's fallback sees each of its uses.
// Operators that fill it are noted down (fills over all of it make the notes before pointless); others find it filled,
// and one that writes leaves it written: then its memory stays. Values depend on (seed, draw, element) alone, so a
// range can be made by itself.
#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "memory/torch_storage.h"
#include "sharding/counter_random.h"

namespace fsdp {

struct FillNote {
  enum class Kind { kValue, kUniform, kNormal };
  Kind kind = Kind::kValue;
  std::int64_t begin = 0, numel = 0;  // elements of the storage
  double a = 0, b = 0;                // value; from, to; mean, deviation
  RandomDraw draw{};
};

// Elements [begin, begin + numel) of what the note fills, at `output`.
void apply(const FillNote& note, DType dtype, std::int64_t begin, std::int64_t numel, std::byte* output);

class DeferredStorage final : public PagedStorage {
 public:
  DeferredStorage(std::int64_t numel, DType dtype);

  // nullptr where the tensor's storage is none.
  static DeferredStorage* of(const at::Tensor& tensor);
  // The storage of a tensor that is all of it, as fsdp::shard can fill it; nullptr for any other.
  static DeferredStorage* whole(const at::Tensor& tensor);

  DType dtype() const { return dtype_; }
  void note(const FillNote& note);
  void fill(std::int64_t begin, std::int64_t numel, std::byte* output) const;
  // A number that two storages with the same notes have in common.
  std::uint64_t hash() const;

  void acquire();
  void release(bool wrote);

 private:
  std::int64_t numel_;
  DType dtype_;
  mutable std::mutex mutex_;
  std::vector<FillNote> notes_;
  std::unique_ptr<std::byte[]> memory_;  // while pinned, and for good once written
  int pins_ = 0;
  bool written_ = false;
};

// A plain tensor of the same values. Throws InvalidArgument for a part of a deferred tensor.
at::Tensor materialized(const at::Tensor& tensor);
// Gives a deferred tensor memory and its values; leaves any other alone.
void materialize_in_place(at::Tensor& tensor);

}  // namespace fsdp
