#include "checkpoint/step_directory.h"

#include <algorithm>
#include <charconv>

#include <fmt/format.h>

#include "checkpoint/xxh3.h"

namespace fsdp {
namespace {
constexpr std::string_view kStepPrefix = "step-";
constexpr std::string_view kTemporaryMark = ".tmp-";
}  // namespace

std::string step_name(std::int64_t step) { return fmt::format("{}{:06}", kStepPrefix, step); }

std::optional<std::int64_t> step_of(std::string_view name) {
  if (!name.starts_with(kStepPrefix)) return std::nullopt;
  std::int64_t step = -1;
  std::from_chars(name.data() + kStepPrefix.size(), name.data() + name.size(), step);
  // Comparing the text leaves one name per step: no sign, no second form with more zeros, nothing behind it.
  if (step < 0 || step_name(step) != name) return std::nullopt;
  return step;
}

std::string temporary_name(std::int64_t step, std::string_view save_id) {
  return fmt::format("{}{}{}", step_name(step), kTemporaryMark, save_id);
}

bool is_temporary(std::string_view name) {
  const std::size_t mark = name.find(kTemporaryMark);
  return mark != std::string_view::npos && step_of(name.substr(0, mark)) &&
         hex_value(name.substr(mark + kTemporaryMark.size()));
}

std::optional<std::int64_t> newest_step(FileSystem& system, const std::filesystem::path& dir) {
  std::vector<std::int64_t> steps;
  for (const std::string& name : list_directory(system, dir)) {
    if (const auto step = step_of(name)) steps.push_back(*step);
  }
  std::sort(steps.begin(), steps.end(), std::greater<>());
  const auto newest = std::find_if(steps.begin(), steps.end(), [&](std::int64_t step) {
    return path_exists(system, dir / step_name(step) / kManifestName);
  });
  if (newest == steps.end()) return std::nullopt;
  return *newest;
}

}  // namespace fsdp
