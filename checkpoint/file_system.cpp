#include "checkpoint/file_system.h"

#include <algorithm>
#include <cerrno>
#include <memory>
#include <optional>
#include <random>
#include <system_error>

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "checkpoint/xxh3.h"

namespace fsdp {
namespace {

// Calls again while a signal interrupts.
template <class Call>
auto uninterrupted(Call call) {
  auto result = call();
  while (result == -1 && errno == EINTR) result = call();
  return result;
}

std::string remedy_for(int error, const std::filesystem::path& path, std::uint64_t needed_bytes) {
  switch (error) {
    case ENOSPC:
    case EDQUOT: {
      struct statvfs disk {};
      const bool known = ::statvfs(path.parent_path().c_str(), &disk) == 0;
      const std::string free_bytes = known ? std::to_string(static_cast<std::uint64_t>(disk.f_bavail) * disk.f_frsize)
                                           : "unknown";
      return fmt::format(" ({} bytes needed, {} free): make room or choose another directory", needed_bytes,
                         free_bytes);
    }
    case EACCES:
    case EPERM:
    case EROFS: return ": make the directory writable for this user, or choose another";
    case ELOOP: return ": a symbolic link stands in a checkpoint; replace it by what it points to";
    case EMFILE: return ": raise the limit of open files (ulimit -n)";
    default: return "";
  }
}

}  // namespace

int FileSystem::open(int directory, const char* path, int flags, mode_t mode) {
  return ::openat(directory, path, flags, mode);
}
int FileSystem::close(int file) { return ::close(file); }
ssize_t FileSystem::pread(int file, void* data, std::size_t bytes, off_t offset) {
  return ::pread(file, data, bytes, offset);
}
ssize_t FileSystem::pwrite(int file, const void* data, std::size_t bytes, off_t offset) {
  return ::pwrite(file, data, bytes, offset);
}
int FileSystem::fsync(int file) { return ::fsync(file); }
int FileSystem::stat(int file, struct stat& result) { return ::fstat(file, &result); }
int FileSystem::lock(int file) { return ::flock(file, LOCK_EX | LOCK_NB); }
int FileSystem::mkdir(const char* path, mode_t mode) { return ::mkdir(path, mode); }
int FileSystem::unlink(const char* path) { return ::unlink(path); }
int FileSystem::rmdir(const char* path) { return ::rmdir(path); }

int FileSystem::allocate(int file, off_t bytes) {
  // posix_fallocate returns the error where its neighbours set errno.
  const int error = ::posix_fallocate(file, 0, bytes);
  errno = error;
  return error == 0 ? 0 : -1;
}

int FileSystem::rename(const char* from, const char* to, unsigned flags) {
  return ::renameat2(AT_FDCWD, from, AT_FDCWD, to, flags);
}

int FileSystem::list(const char* path, std::vector<std::string>& names) {
  const std::unique_ptr<DIR, int (*)(DIR*)> directory(::opendir(path), &::closedir);
  if (!directory) return -1;
  errno = 0;
  while (const dirent* entry = ::readdir(directory.get())) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") names.emplace_back(name);
  }
  return errno == 0 ? 0 : -1;
}

void throw_errno(std::string_view call, const std::filesystem::path& path, int error, std::uint64_t needed_bytes) {
  throw CheckpointError(fmt::format("{} {}: {}{}", call, path.string(), std::generic_category().message(error),
                                    remedy_for(error, path, needed_bytes)));
}

File File::open_at(FileSystem& system, const File* directory, const std::filesystem::path& path, int flags,
                   mode_t mode) {
  const int base = directory ? directory->file_ : AT_FDCWD;
  const int file = uninterrupted([&] { return system.open(base, path.c_str(), flags | O_CLOEXEC, mode); });
  std::filesystem::path full = directory ? directory->path_ / path : path;
  if (file == -1) throw_errno("open", full, errno);
  return File(system, std::move(full), file);
}

File File::create(FileSystem& system, const std::filesystem::path& path, mode_t mode) {
  return open_at(system, nullptr, path, O_WRONLY | O_CREAT | O_EXCL, mode);
}

File File::open(FileSystem& system, const std::filesystem::path& path) {
  // Without O_NONBLOCK a FIFO put in the file's place would wait for a writer for ever.
  File file = open_at(system, nullptr, path, O_RDONLY | O_NONBLOCK, 0);
  file.bytes();
  return file;
}

File File::open_beneath(FileSystem& system, const std::filesystem::path& root, const std::filesystem::path& relative) {
  std::optional<File> directory(open_directory(system, root));
  for (const auto& component : relative.parent_path()) {
    File next = open_at(system, &*directory, component, O_RDONLY | O_DIRECTORY | O_NOFOLLOW, 0);
    directory.emplace(std::move(next));
  }
  File file = open_at(system, &*directory, relative.filename(), O_RDONLY | O_NONBLOCK | O_NOFOLLOW, 0);
  file.bytes();
  return file;
}

File File::open_directory(FileSystem& system, const std::filesystem::path& path) {
  return open_at(system, nullptr, path, O_RDONLY | O_DIRECTORY, 0);
}

File File::open_lock(FileSystem& system, const std::filesystem::path& path) {
  return open_at(system, nullptr, path, O_RDWR | O_CREAT | O_NOFOLLOW, 0600);
}

File::~File() {
  if (file_ != -1) system_->close(file_);
}

std::uint64_t File::bytes() const {
  struct stat status {};
  if (system_->stat(file_, status) == -1) throw_errno("stat", path_, errno);
  if (!S_ISREG(status.st_mode)) throw CheckpointError(fmt::format("open {}: expected a regular file", path_.string()));
  return static_cast<std::uint64_t>(status.st_size);
}

void File::reserve(std::uint64_t bytes) {
  if (bytes == 0) return;
  if (uninterrupted([&] { return system_->allocate(file_, static_cast<off_t>(bytes)); }) == -1) {
    throw_errno("reserve space for", path_, errno, bytes);
  }
}

void File::write(std::uint64_t offset, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const ssize_t written = uninterrupted(
        [&] { return system_->pwrite(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (written == -1) throw_errno("write", path_, errno, bytes.size());
    // POSIX does not say what a write of 0 bytes means here; going round again could be for ever.
    if (written == 0) throw_errno("write", path_, EIO);
    bytes = bytes.subspan(static_cast<std::size_t>(written));
    offset += static_cast<std::uint64_t>(written);
  }
}

void File::read(std::uint64_t offset, std::span<std::byte> bytes) const {
  while (!bytes.empty()) {
    const ssize_t got = uninterrupted(
        [&] { return system_->pread(file_, bytes.data(), bytes.size(), static_cast<off_t>(offset)); });
    if (got == -1) throw_errno("read", path_, errno);
    if (got == 0) {
      throw CheckpointError(
          fmt::format("read {}: file ends at byte {}, {} more were expected", path_.string(), offset, bytes.size()));
    }
    bytes = bytes.subspan(static_cast<std::size_t>(got));
    offset += static_cast<std::uint64_t>(got);
  }
}

std::string File::read_text(std::uint64_t max_bytes) const {
  const std::uint64_t size = bytes();
  if (size > max_bytes) {
    throw CheckpointError(fmt::format("read {}: expected at most {} bytes, got {}", path_.string(), max_bytes, size));
  }
  std::string text(size, '\0');
  read(0, std::as_writable_bytes(std::span(text)));
  return text;
}

void File::sync() {
  if (uninterrupted([&] { return system_->fsync(file_); }) == -1) throw_errno("fsync", path_, errno);
}

void File::close() {
  // The descriptor is gone whatever close returns; EINTR says nothing about the data, which sync() has checked.
  if (system_->close(std::exchange(file_, -1)) == -1 && errno != EINTR) throw_errno("close", path_, errno);
}

bool File::try_lock() {
  if (uninterrupted([&] { return system_->lock(file_); }) == 0) return true;
  if (errno != EWOULDBLOCK) throw_errno("lock", path_, errno);
  return false;
}

bool path_exists(FileSystem& system, const std::filesystem::path& path) {
  const int file = uninterrupted(
      [&] { return system.open(AT_FDCWD, path.c_str(), O_PATH | O_NOFOLLOW | O_CLOEXEC, 0); });
  if (file == -1 && errno != ENOENT && errno != ENOTDIR) throw_errno("look for", path, errno);
  if (file != -1) system.close(file);
  return file != -1;
}

void make_directory(FileSystem& system, const std::filesystem::path& path, mode_t mode) {
  if (system.mkdir(path.c_str(), mode) == -1) throw_errno("create directory", path, errno);
}

void make_directories(FileSystem& system, const std::filesystem::path& path) {
  std::filesystem::path made;
  for (const auto& component : path) {
    made /= component;
    if (component.empty() || component == "/") continue;
    if (system.mkdir(made.c_str(), 0777) == 0) {
      sync_directory(system, made.has_parent_path() ? made.parent_path() : ".");
    } else if (const int error = errno; error != EEXIST && !path_exists(system, made)) {
      // One that exists may also answer EROFS or EACCES; whether it can be written shows at the first file.
      throw_errno("create directory", made, error);
    }
  }
}

void sync_directory(FileSystem& system, const std::filesystem::path& path) {
  File directory = File::open_directory(system, path);
  directory.sync();
  directory.close();
}

void rename_path(FileSystem& system, const std::filesystem::path& from, const std::filesystem::path& to) {
  if (system.rename(from.c_str(), to.c_str(), 0) == -1) throw_errno("rename to", to, errno);
}

void exchange_paths(FileSystem& system, const std::filesystem::path& a, const std::filesystem::path& b) {
  if (system.rename(a.c_str(), b.c_str(), RENAME_EXCHANGE) == 0) return;
  if (errno == EINVAL || errno == ENOSYS) {
    throw CheckpointError(
        fmt::format("exchange with {}: this file system cannot swap two directories in one step: remove {} first",
                    b.string(), b.string()));
  }
  throw_errno("exchange with", b, errno);
}

void remove_tree(FileSystem& system, const std::filesystem::path& path) {
  if (system.unlink(path.c_str()) == 0 || errno == ENOENT) return;
  // EPERM is what POSIX, and some file systems, say for a directory.
  if (errno != EISDIR && errno != EPERM) throw_errno("remove", path, errno);
  for (const std::string& name : list_directory(system, path)) remove_tree(system, path / name);
  if (system.rmdir(path.c_str()) == -1 && errno != ENOENT) throw_errno("remove", path, errno);
}

std::vector<std::string> list_directory(FileSystem& system, const std::filesystem::path& path) {
  std::vector<std::string> names;
  if (system.list(path.c_str(), names) == -1 && errno != ENOENT) throw_errno("list", path, errno);
  std::sort(names.begin(), names.end());
  return names;
}

std::string random_id() {
  std::random_device device;
  return hex_of((static_cast<std::uint64_t>(device()) << 32) | device());
}

}  // namespace fsdp
