// One safetensors file with whole tensors: written by one rank, read by each rank where its parts lie.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include <fsdp/checkpoint.h>

#include "checkpoint/file_system.h"

namespace fsdp {

// What write_consolidated of <fsdp/checkpoint.h> writes.
struct ConsolidatedContent {
  const std::vector<TensorInfo>& tensors;
  const std::map<std::string, std::string>& metadata;
  const std::function<void(const TensorInfo&, std::span<std::byte>)>& fetch;
};

// The functions of <fsdp/checkpoint.h> on a given file system.
void write_consolidated(FileSystem& system, const std::filesystem::path& file, const ConsolidatedContent& content);
void read_consolidated(FileSystem& system, const std::filesystem::path& file, std::span<const ShardView> views,
                       const std::map<std::string, std::string>& tied);

}  // namespace fsdp
