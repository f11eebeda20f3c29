// How a step becomes visible: all of it by one rename, or nothing.
//
//   all ranks   check views, agree on the number of files
//   rank 0      lock the directory, remove what dead saves left, make step-000120.tmp-<save id>/{model,optim,rank}
//   all ranks   write and fsync their files, report files and extents
//   rank 0      write and fsync manifest.json, rename to step-000120, fsync the directory above, write `latest`
#pragma once

#include <filesystem>

#include <fsdp/checkpoint.h>

#include "checkpoint/file_system.h"

namespace fsdp {

// save_checkpoint of <fsdp/checkpoint.h> on a given file system.
std::filesystem::path save_checkpoint(Communicator& communicator, FileSystem& system, const std::filesystem::path& dir,
                                      const CheckpointContent& content);

}  // namespace fsdp
