// The safetensors format: 8 bytes little-endian length N, N bytes of JSON, then the tensors' bytes, back to back.
//
//   bytes 0..8    N, so that 8 + N is a multiple of 4096
//   bytes 8..8+N  {"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]}} and spaces
//   bytes 8+N..   w, row-major
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <fsdp/dtype.h>

namespace fsdp {

struct SafetensorsTensor {
  std::string name;
  DType dtype = DType::kFloat32;
  std::vector<std::int64_t> shape;
  std::uint64_t begin = 0, end = 0;  // bytes, from the start of the file
};

// A file about to be written: what to put at byte 0, and where each tensor's bytes go.
struct SafetensorsLayout {
  std::string head;                        // length, JSON and padding: everything before the first tensor
  std::vector<SafetensorsTensor> tensors;  // in the caller's order, begin and end filled in
  std::vector<std::size_t> order;  // indices into `tensors` by falling dtype size, then name: their order in the file
  std::uint64_t file_bytes = 0;
};

// Throws CheckpointError where a name may not stand in a file or the header grows past the format's limit.
SafetensorsLayout lay_out_safetensors(std::vector<SafetensorsTensor> tensors,
                                      const std::map<std::string, std::string>& metadata);

struct SafetensorsHeader {
  std::vector<SafetensorsTensor> tensors;  // by position in the file
  std::map<std::string, std::string> metadata;
  std::uint64_t data_begin = 0;
};

// Fills `bytes` from `offset` of the file on; throws where the file ends before.
using ReadAt = std::function<void(std::uint64_t offset, std::span<std::byte> bytes)>;

// Reads a header that may be hostile. Throws CheckpointError with the reason alone; the caller adds the file. What is
// returned is sound: known dtypes, byte ranges that equal shape times dtype and tile the file from data_begin to its
// end.
SafetensorsHeader read_safetensors_header(std::uint64_t file_bytes, const ReadAt& read_at);

}  // namespace fsdp
