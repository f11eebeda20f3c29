// Names inside a checkpoint directory, and which of them are committed steps.
#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>

#include "checkpoint/file_system.h"

namespace fsdp {

inline constexpr const char* kManifestName = "manifest.json";
inline constexpr const char* kLatestName = "latest";

// 120 -> "step-000120"
std::string step_name(std::int64_t step);
// The inverse; nullopt for every other text, "step-120" and "step-000120.tmp-..." included.
std::optional<std::int64_t> step_of(std::string_view name);

// "step-000120.tmp-<16 hex digits>": a save that has not ended.
std::string temporary_name(std::int64_t step, std::string_view save_id);
bool is_temporary(std::string_view name);

// The newest committed step of dir: the highest number whose directory holds a manifest. nullopt where there is none.
std::optional<std::int64_t> newest_step(FileSystem& system, const std::filesystem::path& dir);

}  // namespace fsdp
