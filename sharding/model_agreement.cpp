#include "sharding/model_agreement.h"

#include <algorithm>
#include <cstring>
#include <exception>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/version.h>

#include <fsdp/error.h>

#include "memory/torch_compat.h"
#include "sharding/deferred_storage.h"

namespace fsdp {
namespace {

std::string describe_parameter(const NamedParameter& p) {
  const auto list = [](at::IntArrayRef values) { return fmt::format("[{}]", fmt::join(values, ", ")); };
  std::string line = fmt::format("parameter {} {} {}", p.name, c10::toString(p.tensor.scalar_type()),
                                 list(p.tensor.sizes()));
  if (!p.tensor.is_contiguous()) line += " strides " + list(p.tensor.strides());
  if (!p.tensor.requires_grad()) line += " frozen";
  if (const DeferredStorage* deferred = DeferredStorage::of(p.tensor))
    line += fmt::format(" deferred {:016x}", deferred->hash());
  for (const std::string& name : p.tied_names) line += " tied to " + name;
  return line;
}

std::string joined(const std::vector<std::string>& lines) {
  std::string text;
  for (const std::string& line : lines) text += line + "\n";
  return text;
}

// The first line of `own` that is not `first`'s, beside it; "" where there is none.
std::string difference(const std::vector<std::string>& own, const std::string& first) {
  std::size_t begin = 0;
  for (const std::string& line : own) {
    const std::size_t end = first.find('\n', begin);
    const std::string other = end == std::string::npos ? "nothing more" : first.substr(begin, end - begin);
    if (line != other) return fmt::format("{:.400} where rank 0 has {:.400}", line, other);
    begin = end + 1;
  }
  return begin < first.size() ? fmt::format("nothing more where rank 0 has {:.400}",
                                            first.substr(begin, first.find('\n', begin) - begin))
                              : "";
}

}  // namespace

std::vector<std::string> describe_model(const torch::nn::Module& module, const std::vector<CutUnit>& units,
                                        const std::vector<UnitPolicy>& policies, const ShardOptions& options) {
  std::vector<std::string> lines{
      fmt::format("libfsdp {}, LibTorch {}", FSDP_VERSION, TORCH_VERSION),
      fmt::format("options prefetch {}, ordered_sums {}, update_in_backward {}, output {}", options.prefetch,
                  options.ordered_sums, options.update_in_backward,
                  options.precision.output ? c10::toString(*options.precision.output) : "as it comes")};
  for (std::size_t i = 0; i < units.size(); ++i) {
    const UnitPolicy& policy = policies[i];
    lines.push_back(fmt::format("unit {} strategy {}, shards {}, param {}, reduce {}", units[i].name,
                                name_of(policy.strategy), policy.shares, name_of(policy.param),
                                name_of(policy.reduce)));
    for (const NamedParameter& p : units[i].parameters) lines.push_back(describe_parameter(p));
  }
  for (const auto& item : module.named_buffers()) {
    if (item.value().defined())
      lines.push_back(fmt::format("buffer {} of {} bytes", item.key(), item.value().nbytes()));
  }
  return lines;
}

void check_same(Communicator& communicator, std::string_view call, std::string_view what,
                const std::function<std::vector<std::string>()>& describe) {
  std::vector<std::string> lines;
  std::exception_ptr refusal;
  try {
    lines = describe();
  } catch (const InvalidArgument& error) {
    refusal = std::current_exception();
    lines = {error.what()};
  }
  struct Summary {
    std::uint64_t hash = 0, bytes = 0;
    bool operator==(const Summary&) const = default;
  };
  std::string text = joined(lines);
  const Summary own{std::hash<std::string>()(text), text.size()};
  std::vector<Summary> all(static_cast<std::size_t>(communicator.world_size()));
  communicator.all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  if (std::all_of(all.begin(), all.end(), [&](const Summary& summary) { return summary == all[0]; })) {
    if (refusal) std::rethrow_exception(refusal);
    return;
  }

  text.resize(all[0].bytes);
  communicator.broadcast(std::as_writable_bytes(std::span(text)), /*root=*/0);
  constexpr std::size_t kTextBytes = 1024;
  std::string mine = difference(lines, text), texts(kTextBytes * all.size(), '\0');
  mine.resize(kTextBytes);
  communicator.all_gather(std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(texts)));
  for (std::size_t rank = 1; rank < all.size(); ++rank) {
    const char* found = texts.data() + rank * kTextBytes;
    if (*found == '\0') continue;
    throw InvalidArgument(fmt::format("{}: rank {} has {} than rank 0: {:.{}}; give every rank the same", call, rank,
                                      what, found, kTextBytes),
                          static_cast<int>(rank));
  }
}

}  // namespace fsdp
