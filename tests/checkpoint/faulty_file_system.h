// A file system that counts its calls, records them, and fails or cuts short the one it is told to.
#pragma once

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>
#include <vector>

#include "checkpoint/file_system.h"

namespace fsdp {

class FaultyFileSystem : public FileSystem {
 public:
  int fail_at = -1;         // the n-th call, from 0, that may fail; -1 = none
  bool persistent = false;  // and all after it
  int error = EIO;
  bool stutter = false;            // every other call is interrupted, transfers move at most 100 bytes
  std::vector<std::string> calls;  // "open", "pwrite", ... in order

  int open(int directory, const char* path, int flags, mode_t mode) override {
    return may("open") ? FileSystem::open(directory, path, flags, mode) : -1;
  }
  int close(int file) override {
    // A failing close has closed the file all the same.
    const int result = FileSystem::close(file);
    return may_not_stutter("close") ? result : -1;
  }
  ssize_t pread(int file, void* data, std::size_t bytes, off_t offset) override {
    return may("pread") ? FileSystem::pread(file, data, cut(bytes), offset) : -1;
  }
  ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t offset) override {
    return may("pwrite") ? FileSystem::pwrite(file, data, cut(bytes), offset) : -1;
  }
  int allocate(int file, off_t bytes) override { return may("allocate") ? FileSystem::allocate(file, bytes) : -1; }
  int fsync(int file) override { return may("fsync") ? FileSystem::fsync(file) : -1; }
  int stat(int file, struct stat& result) override {
    return may_not_stutter("stat") ? FileSystem::stat(file, result) : -1;
  }
  int lock(int file) override { return may("lock") ? FileSystem::lock(file) : -1; }
  int mkdir(const char* path, mode_t mode) override {
    return may_not_stutter("mkdir") ? FileSystem::mkdir(path, mode) : -1;
  }
  int rename(const char* from, const char* to, unsigned flags) override {
    return may_not_stutter("rename") ? FileSystem::rename(from, to, flags) : -1;
  }
  int unlink(const char* path) override { return may_not_stutter("unlink") ? FileSystem::unlink(path) : -1; }
  int rmdir(const char* path) override { return may_not_stutter("rmdir") ? FileSystem::rmdir(path) : -1; }
  int list(const char* path, std::vector<std::string>& names) override {
    return may_not_stutter("list") ? FileSystem::list(path, names) : -1;
  }

 private:
  bool may_not_stutter(const char* call) {
    const int index = static_cast<int>(calls.size());
    calls.emplace_back(call);
    if (fail_at < 0 || (persistent ? index < fail_at : index != fail_at)) return true;
    errno = error;
    return false;
  }

  bool may(const char* call) {
    if (stutter && (odd_ = !odd_)) {
      errno = EINTR;
      return false;
    }
    return may_not_stutter(call);
  }

  std::size_t cut(std::size_t bytes) const { return stutter ? std::min<std::size_t>(bytes, 100) : bytes; }

  bool odd_ = false;
};

}  // namespace fsdp
