// How a plan is shown: a table for people, JSON for programs.
#include <fsdp/memory_stats.h>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <nlohmann/json.hpp>

namespace fsdp {
namespace {

double mebibytes(std::size_t bytes) { return static_cast<double>(bytes) / (1024.0 * 1024.0); }

// 0-based positions of equal neighbours folded: "a b b b c" -> "a b x3 c".
std::string folded(const std::vector<std::string>& runs) {
  std::string text;
  for (std::size_t begin = 0, end = 0; begin < runs.size(); begin = end) {
    while (end < runs.size() && runs[end] == runs[begin]) ++end;
    text += fmt::format("{}{}{}", text.empty() ? "" : " ", runs[begin],
                        end - begin > 1 ? fmt::format(" x{}", end - begin) : "");
  }
  return text;
}

}  // namespace

std::string Plan::to_string() const {
  std::string text = fmt::format(
      "{} rank(s), backend {}{}, prefetch {}, {} slots of {:.2f} MiB, {} intra-op thread(s), key {}\n", world_size,
      backend, backend_reason.empty() ? "" : fmt::format(" ({})", backend_reason), prefetch, slots,
      mebibytes(slot_bytes), intra_op_threads, dispatch_key);
  text += fmt::format("  {:<32}{:>14}{:>14}{:>14}  {}\n", fmt::format("unit (by {})", units_by), "parameters",
                      "trainable", "gathered MiB", "strategy, shared by");
  for (const UnitPlan& unit : units) {
    text += fmt::format("  {:<32}{:>14}{:>14}{:>14.2f}  {} {}, {}\n", unit.name, unit.numel, unit.trainable_numel,
                        mebibytes(unit.parameter_bytes), unit.strategy, unit.param_dtype, unit.shard_group);
  }
  const auto row = [&text](std::string_view what, std::size_t bytes) {
    text += fmt::format("  {:<32}{:>14.2f}\n", what, mebibytes(bytes));
  };
  text += fmt::format("  {:<32}{:>14}\n", "per rank", "MiB");
  const auto row_if_any = [&row](std::string_view what, std::size_t bytes) {
    if (bytes > 0) row(what, bytes);
  };
  row("parameters", predicted.parameter_shard_bytes);
  row_if_any("fp32 masters", predicted.master_bytes);
  row("gradients", predicted.gradient_shard_bytes);
  row_if_any("gradients within no_sync", predicted.no_sync_bytes);
  row("optimizer state", predicted.optimizer_bytes);
  row("arena", predicted.arena_bytes);
  row("communication", predicted.communication_bytes);
  row("total without activations", predicted.total_bytes());
  row("plain LibTorch needs", unsharded_bytes);
  if (!timeline.empty()) text += fmt::format("  timeline: {}\n", folded(timeline));
  return text;
}

std::string Plan::to_json() const {
  nlohmann::ordered_json json = {{"world_size", world_size},
                                 {"backend", backend},
                                 {"backend_reason", backend_reason},
                                 {"prefetch", prefetch},
                                 {"slots", slots},
                                 {"slot_bytes", slot_bytes},
                                 {"intra_op_threads", intra_op_threads},
                                 {"dispatch_key", dispatch_key},
                                 {"units_by", units_by}};
  for (const UnitPlan& unit : units) {
    json["units"].push_back({{"name", unit.name},
                             {"numel", unit.numel},
                             {"trainable_numel", unit.trainable_numel},
                             {"parameter_bytes", unit.parameter_bytes},
                             {"strategy", unit.strategy},
                             {"shard_group", unit.shard_group},
                             {"param_dtype", unit.param_dtype}});
  }
  json["predicted"] = {{"parameter_shard_bytes", predicted.parameter_shard_bytes},
                       {"master_bytes", predicted.master_bytes},
                       {"gradient_shard_bytes", predicted.gradient_shard_bytes},
                       {"no_sync_bytes", predicted.no_sync_bytes},
                       {"optimizer_bytes", predicted.optimizer_bytes},
                       {"arena_bytes", predicted.arena_bytes},
                       {"communication_bytes", predicted.communication_bytes},
                       {"total_bytes", predicted.total_bytes()}};
  json["unsharded_bytes"] = unsharded_bytes;
  json["timeline"] = timeline;
  return json.dump(2);
}

}  // namespace fsdp
