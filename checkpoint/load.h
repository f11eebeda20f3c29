// From the newest committed step back into views, whatever the world sizes.
#pragma once

#include <filesystem>
#include <optional>
#include <span>

#include <fsdp/checkpoint.h>

#include "checkpoint/file_system.h"

namespace fsdp {

// load_checkpoint of <fsdp/checkpoint.h> on a given file system. Beyond the views at most one extent is in memory.
std::optional<LoadedCheckpoint> load_checkpoint(Communicator& communicator, FileSystem& system,
                                                const std::filesystem::path& dir, std::span<const ShardView> views);

}  // namespace fsdp
