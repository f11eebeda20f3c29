// The disk as checkpoints use it. FileSystem is the calls themselves, virtual so that a test can fail, shorten or
// record every one; File and the functions below turn them into RAII and errors that name path, call and reason.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/stat.h>
#include <sys/types.h>

namespace fsdp {

// Each call as in POSIX: -1 and errno on failure. This class asks the operating system.
class FileSystem {
 public:
  virtual ~FileSystem() = default;
  virtual int open(int directory, const char* path, int flags, mode_t mode);  // openat
  virtual int close(int file);
  virtual ssize_t pread(int file, void* data, std::size_t bytes, off_t offset);
  virtual ssize_t pwrite(int file, const void* data, std::size_t bytes, off_t offset);
  virtual int allocate(int file, off_t bytes);  // posix_fallocate from 0
  virtual int fsync(int file);
  virtual int stat(int file, struct stat& result);  // fstat
  virtual int lock(int file);                       // flock, exclusive, without waiting
  virtual int mkdir(const char* path, mode_t mode);
  virtual int rename(const char* from, const char* to, unsigned flags);  // renameat2
  virtual int unlink(const char* path);
  virtual int rmdir(const char* path);
  virtual int list(const char* path, std::vector<std::string>& names);  // without . and ..
};

// Throws CheckpointError "<call> <path>: <text of errno>" with the remedy where one is known. `needed_bytes` is told
// for a full disk.
[[noreturn]] void throw_errno(std::string_view call, const std::filesystem::path& path, int error,
                              std::uint64_t needed_bytes = 0);

// An open file or directory. Calls are repeated over EINTR and short transfers.
class File {
 public:
  // A new file; an existing one, also a link, is an error.
  static File create(FileSystem& system, const std::filesystem::path& path, mode_t mode);
  // A regular file to read.
  static File open(FileSystem& system, const std::filesystem::path& path);
  // "a/b/c" below `root`: no component of it may be a link, so nothing outside `root` is opened.
  static File open_beneath(FileSystem& system, const std::filesystem::path& root,
                           const std::filesystem::path& relative);
  static File open_directory(FileSystem& system, const std::filesystem::path& path);
  // For reading and writing, made if missing; a link is an error.
  static File open_lock(FileSystem& system, const std::filesystem::path& path);

  File(File&& other) noexcept
      : system_(other.system_), path_(std::move(other.path_)), file_(std::exchange(other.file_, -1)) {}
  File& operator=(File&&) = delete;
  ~File();  // closes without a check: what was written is safe only after sync() and close()

  const std::filesystem::path& path() const { return path_; }
  std::uint64_t bytes() const;
  // Takes the space now, so that a full disk is found before anything is written.
  void reserve(std::uint64_t bytes);
  void write(std::uint64_t offset, std::span<const std::byte> bytes);
  void read(std::uint64_t offset, std::span<std::byte> bytes) const;
  std::string read_text(std::uint64_t max_bytes) const;
  void sync();
  void close();
  // False where another process or open file holds the lock. Released when the file is closed.
  bool try_lock();

 private:
  File(FileSystem& system, std::filesystem::path path, int file)
      : system_(&system), path_(std::move(path)), file_(file) {}
  static File open_at(FileSystem& system, const File* directory, const std::filesystem::path& path, int flags,
                      mode_t mode);

  FileSystem* system_;  // borrowed; outlives the file
  std::filesystem::path path_;
  int file_;
};

// Whether anything has this name, a link included.
bool path_exists(FileSystem& system, const std::filesystem::path& path);
void make_directory(FileSystem& system, const std::filesystem::path& path, mode_t mode);
// With its parents; existing ones are fine.
void make_directories(FileSystem& system, const std::filesystem::path& path);
void sync_directory(FileSystem& system, const std::filesystem::path& path);
void rename_path(FileSystem& system, const std::filesystem::path& from, const std::filesystem::path& to);
// Swaps two existing names in one step.
void exchange_paths(FileSystem& system, const std::filesystem::path& a, const std::filesystem::path& b);
// Removes a file, a link (not what it points to) or a directory with all it holds; nothing there is fine.
void remove_tree(FileSystem& system, const std::filesystem::path& path);
// Names in a directory, sorted; empty where there is none.
std::vector<std::string> list_directory(FileSystem& system, const std::filesystem::path& path);
// 64 bits that no other save has, as 16 hex digits.
std::string random_id();

}  // namespace fsdp
