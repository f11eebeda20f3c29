#include "tests/comm/reference.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <stdexcept>
#include <type_traits>

namespace fsdp::reference {
namespace {

struct BFloat16 {
  std::uint16_t bits;
  explicit BFloat16(float value) {
    // The nearest of the two neighbours, the even one if both are as near.
    const auto full = std::bit_cast<std::uint32_t>(value);
    const std::uint32_t below = full >> 16, rest = full & 0xffffU;
    bits = static_cast<std::uint16_t>(rest > 0x8000U || (rest == 0x8000U && below % 2 == 1) ? below + 1 : below);
  }
  explicit operator float() const { return std::bit_cast<float>(static_cast<std::uint32_t>(bits) << 16); }
};

template <class T>
struct SumOf {
  using Type = T;
};
template <>
struct SumOf<BFloat16> {
  using Type = float;
};
template <>
struct SumOf<_Float16> {
  using Type = float;
};

std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 31)) * 0x9e3779b97f4a7c15U;
  return x ^ (x >> 29);
}

template <class T>
T element(int rank, std::int64_t i) {
  const std::uint64_t random = mix(static_cast<std::uint64_t>(rank + 1) * 0x100000000U + static_cast<std::uint64_t>(i));
  if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(random);
  } else {
    const auto mantissa = static_cast<float>(static_cast<int>(random & 0xffffU) - 0x8000) / 1048576.0F;
    return static_cast<T>(
        static_cast<typename SumOf<T>::Type>(mantissa * static_cast<float>(1U << (random >> 16 & 15))));
  }
}

template <class T>
T at(const Bytes& bytes, std::int64_t i) {
  alignas(T) std::byte raw[sizeof(T)];
  std::memcpy(raw, bytes.data() + static_cast<std::size_t>(i) * sizeof(T), sizeof(T));
  return std::bit_cast<T>(raw);
}

template <class T>
void put(Bytes& bytes, std::int64_t i, T value) {
  std::memcpy(bytes.data() + static_cast<std::size_t>(i) * sizeof(T), &value, sizeof(T));
}

template <class T>
Bytes make(std::int64_t numel) {
  return Bytes(static_cast<std::size_t>(numel) * sizeof(T));
}

template <class S>
S add(S a, S b) {
  if constexpr (std::is_integral_v<S>)
    return static_cast<S>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));
  else
    return a + b;
}

// Calls body.operator()<T>() with the type that `dtype` is stored in.
template <class Body>
Bytes with_type(DType dtype, const Body& body) {
  switch (dtype) {
    case DType::kFloat32: return body.template operator()<float>();
    case DType::kFloat64: return body.template operator()<double>();
    case DType::kFloat16: return body.template operator()<_Float16>();
    case DType::kBFloat16: return body.template operator()<BFloat16>();
    case DType::kInt64: return body.template operator()<std::int64_t>();
    case DType::kInt32: return body.template operator()<std::int32_t>();
    case DType::kInt16: return body.template operator()<std::int16_t>();
    case DType::kInt8: return body.template operator()<std::int8_t>();
    case DType::kUInt8: return body.template operator()<std::uint8_t>();
    case DType::kBool: break;
  }
  throw std::logic_error("no reference for bool");
}

}  // namespace

Bytes elements(DType dtype, int rank, std::int64_t numel) {
  return with_type(dtype, [&]<class T>() {
    Bytes bytes = make<T>(numel);
    for (std::int64_t i = 0; i < numel; ++i) put(bytes, i, element<T>(rank, i));
    return bytes;
  });
}

Bytes fold(DType dtype, ReduceOp op, std::span<const Bytes> inputs) {
  return with_type(dtype, [&]<class T>() {
    using Sum = typename SumOf<T>::Type;
    Bytes result(inputs[0].size());
    for (std::int64_t i = 0; i < static_cast<std::int64_t>(result.size() / sizeof(T)); ++i) {
      Sum sum = static_cast<Sum>(at<T>(inputs[0], i));
      for (const Bytes& input : inputs.subspan(1)) {
        const Sum next = static_cast<Sum>(at<T>(input, i));
        sum = op == ReduceOp::kSum ? add(sum, next) : op == ReduceOp::kMax ? std::max(sum, next) : std::min(sum, next);
      }
      put(result, i, static_cast<T>(sum));
    }
    return result;
  });
}

Bytes reduce(DType dtype, std::span<const Bytes> inputs, std::int64_t numel, int divisor, const Bytes& base) {
  return with_type(dtype, [&]<class T>() {
    using Sum = typename SumOf<T>::Type;
    Bytes result = base.empty() ? make<Sum>(numel) : base;
    for (std::int64_t i = 0; i < numel; ++i) {
      Sum sum{};
      for (std::size_t rank = 0; rank < inputs.size(); ++rank) {
        const Sum next = inputs[rank].empty() ? Sum{} : static_cast<Sum>(at<T>(inputs[rank], i));
        sum = rank == 0 ? next : add(sum, next);
      }
      sum = static_cast<Sum>(sum / static_cast<Sum>(divisor));
      put(result, i, base.empty() ? sum : add(at<Sum>(base, i), sum));
    }
    return result;
  });
}

}  // namespace fsdp::reference
