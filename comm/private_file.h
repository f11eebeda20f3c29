// What no other user of this machine can read or put in our place.
#pragma once

#include <sys/stat.h>
#include <unistd.h>

namespace fsdp {

// This user's, and nobody else's to read, write or enter. Root is not kept out by anything.
inline bool is_private(const struct stat& status) {
  return status.st_uid == ::geteuid() && (status.st_mode & (S_IRWXG | S_IRWXO)) == 0;
}

}  // namespace fsdp
