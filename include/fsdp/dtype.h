// Element types, without a torch header: communicators and checkpoints name a dtype but never a tensor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace fsdp {

enum class DType : std::uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt64,
  kInt32,
  kInt16,
  kInt8,
  kUInt8,
  kBool
};

constexpr std::size_t size_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat64:
    case DType::kInt64: return 8;
    case DType::kFloat32:
    case DType::kInt32: return 4;
    case DType::kFloat16:
    case DType::kBFloat16:
    case DType::kInt16: return 2;
    case DType::kInt8:
    case DType::kUInt8:
    case DType::kBool: return 1;
  }
  return 0;
}

constexpr std::size_t bytes_of(std::int64_t numel, DType dtype) {
  return static_cast<std::size_t>(numel) * size_of(dtype);
}

// The safetensors name: "F32", "BF16", "I64", ...
constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return "F32";
    case DType::kFloat64: return "F64";
    case DType::kFloat16: return "F16";
    case DType::kBFloat16: return "BF16";
    case DType::kInt64: return "I64";
    case DType::kInt32: return "I32";
    case DType::kInt16: return "I16";
    case DType::kInt8: return "I8";
    case DType::kUInt8: return "U8";
    case DType::kBool: return "BOOL";
  }
  return "";
}

// The inverse of name_of; nullopt for a name that no DType has.
constexpr std::optional<DType> dtype_of(std::string_view name) {
  for (int i = 0; i <= static_cast<int>(DType::kBool); ++i) {
    if (name_of(static_cast<DType>(i)) == name) return static_cast<DType>(i);
  }
  return std::nullopt;
}

}  // namespace fsdp
