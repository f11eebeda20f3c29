#include "examples/train_gpt/corpus.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <fstream>
#include <memory>
#include <string_view>
#include <system_error>

#include <fmt/format.h>

namespace gpt {

namespace fs = std::filesystem;

namespace {

constexpr std::size_t kHeldOutEvery = 20;
constexpr std::size_t kLargestBlock = 32 << 10;
constexpr std::array<std::string_view, 14> kTextExtensions = {".h",  ".hh",  ".hpp", ".hxx", ".c",   ".cc", ".cpp",
                                                              ".cu", ".cuh", ".cxx", ".py",  ".txt", ".md", ".rst"};

// A counter-based generator (the finaliser of SplitMix64, applied to each coordinate in turn): any draw of any step is
// computed on its own, with no state to save or to keep alike between ranks.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

std::uint64_t draw(std::int64_t seed, std::int64_t step, std::int64_t row) {
  return mix(mix(mix(static_cast<std::uint64_t>(seed)) ^ static_cast<std::uint64_t>(step)) ^
             static_cast<std::uint64_t>(row));
}

void append_file(std::string& text, const fs::path& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const auto bytes = file ? static_cast<std::streamoff>(file.tellg()) : -1;
  if (bytes < 0)
    throw DataError(fmt::format("cannot read {}: check --data, and that the file may be read", path.string()));
  const auto old_size = text.size();
  text.resize(old_size + static_cast<std::size_t>(bytes));
  file.seekg(0);
  if (!file.read(text.data() + old_size, bytes))
    throw DataError(fmt::format("reading {} failed half way: expected {} bytes", path.string(), bytes));
}

bool is_text(const fs::path& path) {
  return std::find(kTextExtensions.begin(), kTextExtensions.end(), path.extension().string()) != kTextExtensions.end();
}

// Sorted, since the order in which a directory lists its entries differs between machines and ranks.
std::vector<fs::path> text_files_below(const fs::path& folder) {
  std::vector<fs::path> files;
  std::error_code error;
  fs::recursive_directory_iterator entry(folder, error), end;
  for (; !error && entry != end; entry.increment(error)) {
    if (entry->is_regular_file(error) && is_text(entry->path())) files.push_back(entry->path());
  }
  if (error) throw DataError(fmt::format("cannot read folder {}: {}; check --data", folder.string(), error.message()));
  if (files.empty()) {
    throw DataError(fmt::format("folder {} holds no text: expected files named {}; name other files directly by --data",
                                folder.string(), fmt::join(kTextExtensions, " ")));
  }
  std::sort(files.begin(), files.end());
  return files;
}

}  // namespace

Corpus Corpus::read(const std::vector<fs::path>& paths, std::int64_t context) {
  std::string text;
  std::int64_t count = 0;
  for (const auto& path : paths) {
    std::error_code error;
    const auto status = fs::status(path, error);
    if (!fs::exists(status)) throw DataError(fmt::format("no file or folder {}: check --data", path.string()));
    const auto files = fs::is_directory(status) ? text_files_below(path) : std::vector<fs::path>{path};
    for (const auto& file : files) append_file(text, file);
    count += static_cast<std::int64_t>(files.size());
  }
  if (text.empty())
    throw DataError(fmt::format("the {} file(s) of --data are empty: name files that hold text", count));
  Corpus corpus(text, context);
  corpus.files_ = count;
  return corpus;
}

Corpus::Corpus(const std::string& text, std::int64_t context) : window_(context + 1) {
  // A short text is cut finer, so that it too has a twentieth block.
  const auto block = std::clamp<std::size_t>(text.size() / kHeldOutEvery, 1, kLargestBlock);
  for (std::size_t offset = 0, index = 1; offset < text.size(); offset += block, ++index) {
    (index % kHeldOutEvery == 0 ? held_out_ : train_).append(text, offset, block);
  }
  if (std::min(train_bytes(), held_out_bytes()) < window_) {
    throw DataError(fmt::format(
        "--context {} is longer than the text: a window takes {} bytes, the text has {} to train on and {} held out; "
        "give more --data or a shorter --context",
        window_ - 1, window_, train_bytes(), held_out_bytes()));
  }
}

void Corpus::append_window(Windows& windows, const std::string& text, std::int64_t offset) const {
  const auto begin = text.begin() + offset;
  windows.bytes.insert(windows.bytes.end(), begin, begin + window_);
  ++windows.rows;
}

Windows Corpus::batch(const BatchRequest& request) const {
  const auto rows = request.global_rows / request.world_size;
  const auto offsets = static_cast<std::uint64_t>(train_bytes() - window_ + 1);
  Windows windows{.length = window_};
  windows.bytes.reserve(static_cast<std::size_t>(rows * window_));
  for (auto row = request.rank * rows; row < (request.rank + 1) * rows; ++row) {
    append_window(windows, train_, static_cast<std::int64_t>(draw(request.seed, request.step, row) % offsets));
  }
  return windows;
}

Windows Corpus::held_out_window(std::int64_t index, std::int64_t count) const {
  Windows windows{.length = window_};
  append_window(windows, held_out_, count > 1 ? (held_out_bytes() - window_) * index / (count - 1) : 0);
  return windows;
}

double Corpus::bigram_entropy() const {
  std::vector<std::int64_t> pairs(256 * 256);
  std::array<std::int64_t, 256> firsts{};
  for (std::size_t i = 1; i < train_.size(); ++i) {
    const auto first = static_cast<std::uint8_t>(train_[i - 1]), second = static_cast<std::uint8_t>(train_[i]);
    ++pairs[first * 256u + second];
    ++firsts[first];
  }
  double entropy = 0;
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    if (pairs[i] == 0) continue;
    const auto pair = static_cast<double>(pairs[i]);
    entropy -= pair * std::log(pair / static_cast<double>(firsts[i / 256]));
  }
  return entropy / static_cast<double>(train_.size() - 1);
}

}  // namespace gpt
