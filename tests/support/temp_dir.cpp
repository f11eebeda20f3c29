#include "tests/support/temp_dir.h"

#include <algorithm>
#include <fstream>
#include <iterator>
#include <system_error>

#include <stdlib.h>
#include <unistd.h>

namespace fsdp {

namespace {

// In memory where that can be had: a save waits for the disk a dozen times, and the tests save thousands of times.
// TMPDIR chooses another.
std::filesystem::path parent_directory() {
  if (::getenv("TMPDIR") == nullptr && ::access("/dev/shm", W_OK) == 0) return "/dev/shm";
  return std::filesystem::temp_directory_path();
}

}  // namespace

TempDir::TempDir() {
  std::string name = (parent_directory() / "fsdp-test-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw std::system_error(errno, std::generic_category(), name);
  path_ = name;
}

TempDir::~TempDir() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

void write_file(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream(path, std::ios::binary).write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
}

void flip_bit(const std::filesystem::path& path, std::uint64_t byte, int bit) {
  std::string bytes = read_file(path);
  bytes.at(byte) = static_cast<char>(bytes[byte] ^ (1 << bit));
  write_file(path, bytes);
}

std::vector<std::string> files_below(const std::filesystem::path& dir) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir)) {
    if (!entry.is_directory()) names.push_back(entry.path().lexically_relative(dir).string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

}  // namespace fsdp
