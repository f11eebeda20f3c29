// A directory that lasts as long as a test, and the bytes of files in it.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace fsdp {

class TempDir {
 public:
  TempDir();
  ~TempDir();
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::filesystem::path& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& bytes);
void flip_bit(const std::filesystem::path& path, std::uint64_t byte, int bit = 0);
// Paths of all files below `dir`, relative to it, sorted.
std::vector<std::string> files_below(const std::filesystem::path& dir);

}  // namespace fsdp
