#include "checkpoint/tensor_match.h"

#include <algorithm>
#include <numeric>
#include <optional>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <fsdp/error.h>

#include "checkpoint/reshard_plan.h"
#include "checkpoint/strict_json.h"

namespace fsdp {
namespace {

constexpr std::size_t kMaxListed = 8;  // of each kind of difference; the rest is counted

using Key = std::pair<ShardKind, std::string>;

std::size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 1; i <= a.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      const std::size_t replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = std::exchange(row[j], std::min({replaced, row[j] + 1, row[j - 1] + 1}));
    }
  }
  return row.back();
}

// " (nearest: x)" where a name is less than half different; else nothing.
std::string nearest_hint(const std::string& name, const std::vector<std::string>& candidates) {
  std::size_t best = (name.size() + 1) / 2;
  const std::string* nearest = nullptr;
  for (const std::string& candidate : candidates) {
    if (const std::size_t distance = edit_distance(name, candidate); distance < best) {
      best = distance;
      nearest = &candidate;
    }
  }
  return nearest ? fmt::format(" (nearest: {})", *nearest) : "";
}

// "; missing in the checkpoint: a, b and 3 more", or nothing.
std::string listed(const char* title, const std::vector<std::string>& items) {
  if (items.empty()) return "";
  const auto shown = std::span(items).first(std::min(items.size(), kMaxListed));
  const std::string rest = items.size() > kMaxListed ? fmt::format(" and {} more", items.size() - kMaxListed) : "";
  return fmt::format("; {}: {}{}", title, fmt::join(shown, ", "), rest);
}

struct Differences {
  std::vector<std::string> missing, unexpected, shape, dtype;

  bool none() const { return missing.empty() && unexpected.empty() && shape.empty() && dtype.empty(); }

  std::string message() const {
    std::vector<std::string> missing_with_hints;
    for (const std::string& name : missing) {
      // Hints are only worked out for names that are shown: a distance to each of thousands of names is not free.
      missing_with_hints.push_back(missing_with_hints.size() < kMaxListed ? name + nearest_hint(name, unexpected)
                                                                          : name);
    }
    return "it was saved from another model or optimizer" + listed("missing in the checkpoint", missing_with_hints) +
           listed("not asked for by the model", unexpected) + listed("shape", shape) + listed("dtype", dtype) +
           "; build the model and its optimizer as they were when it was saved";
  }
};

std::optional<std::size_t> find_tensor(const ShardView& view, const std::map<Key, std::size_t>& index,
                                       const Aliases& aliases) {
  if (const auto own = index.find({view.kind, view.name}); own != index.end()) return own->second;
  const auto [first, last] = aliases.instead.equal_range(view.name);
  for (auto alias = first; alias != last; ++alias) {
    if (const auto other = index.find({view.kind, alias->second}); other != index.end()) return other->second;
  }
  return std::nullopt;
}

void check_view(const ShardView& view) {
  if (const std::string fault = name_fault(view.name); !fault.empty()) throw CheckpointError(fault);
  directory_of(view.kind);
  boxes_of({view.shape, view.strides, view.begin, view.end});
  if (view.data == nullptr && view.begin != view.end) {
    throw CheckpointError("expected data for a range that is not empty, got null");
  }
}

}  // namespace

void check_views(std::span<const ShardView> views) {
  std::set<Key> names;
  for (const ShardView& view : views) {
    try {
      check_view(view);
    } catch (const Error& error) {
      throw CheckpointError(fmt::format("view {:.128}: {}", view.name, error.what()));
    }
    if (!names.emplace(view.kind, view.name).second) {
      throw CheckpointError(fmt::format("view {}: its name stands twice", view.name));
    }
  }
}

std::vector<std::size_t> match_views(std::span<const ShardView> views, std::span<const ManifestTensor> offered,
                                     const Aliases& aliases) {
  std::map<Key, std::size_t> index;
  for (std::size_t i = 0; i < offered.size(); ++i) index.emplace(Key(offered[i].kind, offered[i].name), i);
  std::vector<std::size_t> found;
  std::vector<bool> asked_for(offered.size(), false);
  Differences differences;
  for (const ShardView& view : views) {
    const auto tensor = find_tensor(view, index, aliases);
    if (!tensor) {
      differences.missing.push_back(view.name);
      continue;
    }
    found.push_back(*tensor);
    asked_for[*tensor] = true;
    const ManifestTensor& saved = offered[*tensor];
    if (saved.shape != view.shape) {
      differences.shape.push_back(fmt::format("{} expected {}, got {}", view.name, view.shape, saved.shape));
    }
    if (saved.dtype != view.dtype) {
      differences.dtype.push_back(
          fmt::format("{} expected {}, got {}", view.name, name_of(view.dtype), name_of(saved.dtype)));
    }
  }
  for (std::size_t i = 0; i < offered.size(); ++i) {
    if (!asked_for[i] && !aliases.not_needed.contains(offered[i].name)) {
      differences.unexpected.push_back(offered[i].name);
    }
  }
  if (!differences.none()) throw CheckpointError(differences.message());
  return found;
}

}  // namespace fsdp
