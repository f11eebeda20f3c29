#include "sharding/gradient_norm.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

struct Part {
  double norm = 0;
  ExactSum exact_norm;  // in its place: NOTE [Ordered sums]
  std::int64_t first_bad = std::numeric_limits<std::int64_t>::max();
  SampleCount count;
};

// The exact sum of |x|^p; false where an element is not finite.
template <class Element>
bool add_exactly(const std::byte* bytes, std::int64_t numel, double p, ExactSum& sum) {
  const auto* data = reinterpret_cast<const Element*>(bytes);
  bool finite = true;
  for (std::int64_t i = 0; i < numel; ++i) {
    const double x = std::abs(static_cast<double>(data[i]));
    const double term = p == 2 ? x * x : p == 1 ? x : std::pow(x, p);
    if (std::isfinite(term)) sum.add(term);
    finite &= std::isfinite(term);
  }
  return finite;
}

Part own_part(const EngineCore& core, const std::vector<bool>& used, const std::vector<double>& squares,
              double p_norm) {
  Part own;
  for (std::size_t i = 0; i < used.size(); ++i) {
    if (!used[i]) continue;
    const ShardedParameter& p = core.model.parameters[i];
    const FlatGroup& group = core.model.group_of(p);
    const ElementRange range = core.summed_here(p);
    const DType dtype = group.gradient_dtype();
    const std::byte* data = core.gradient_shard(group) + bytes_of(range.offset, dtype);
    if (core.ordered_sums && !std::isinf(p_norm)) {
      const auto add = dtype == DType::kFloat64 ? add_exactly<double> : add_exactly<float>;
      if (!add(data, range.numel, p_norm, own.exact_norm))
        own.first_bad = std::min(own.first_bad, static_cast<std::int64_t>(i));
      continue;
    }
    const double norm = p_norm == 2 ? squares[i] : norm_part(data, range.numel, dtype, p_norm);
    if (!std::isfinite(norm)) own.first_bad = std::min(own.first_bad, static_cast<std::int64_t>(i));
    own.norm = combine_norm_parts(own.norm, norm, p_norm);
  }
  return own;
}

double weight_of(const std::vector<Part>& parts, bool ordered_sums) {
  ExactSum sum;
  bool weighed = false;
  for (const Part& part : parts) {
    sum.add(part.count.samples);
    weighed |= part.count.weighed;
  }
  if (!weighed) return 1;
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (!parts[rank].count.unweighed) continue;
    throw InvalidArgument(
        fmt::format("Optimizer::step: rank {} has gradients of losses that Engine::weigh has not seen, "
                    "other ranks have weighed theirs; weigh every loss of a step, or none",
                    rank),
        static_cast<int>(rank));
  }
  const double samples = sum.value();
  if (!(samples > 0))
    throw InvalidArgument(fmt::format("Optimizer::step: expected samples above 0 over all ranks, got {}", samples));
  return (ordered_sums ? 1 : static_cast<double>(parts.size())) / samples;
}

}  // namespace

GradientSummary summarize_gradients(const EngineCore& core, const std::vector<bool>& used,
                                    const std::vector<double>& squares, double p, const SampleCount& own_count) {
  Part own = own_part(core, used, squares, p);
  own.count = own_count;
  std::vector<Part> all(static_cast<std::size_t>(core.context.world_size()));
  core.communicator().all_gather(std::as_bytes(std::span(&own, 1)), std::as_writable_bytes(std::span(all)));
  // Combined in rank order on every rank: the same bits everywhere.
  Part total;
  for (const Part& part : all) {
    total.norm = combine_norm_parts(total.norm, part.norm, p);
    total.exact_norm.add(part.exact_norm);
    total.first_bad = std::min(total.first_bad, part.first_bad);
  }
  const bool bad = total.first_bad != Part{}.first_bad;
  const double norm = core.ordered_sums && !std::isinf(p) ? total.exact_norm.value() : total.norm;
  return {norm_of(norm, p), bad ? static_cast<int>(total.first_bad) : -1, weight_of(all, core.ordered_sums)};
}

}  // namespace fsdp
