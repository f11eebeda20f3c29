#include "sharding/owner_placement.h"

#include <algorithm>
#include <numeric>

namespace fsdp {

std::vector<int> place_owners(const std::vector<std::int64_t>& work, int ranks) {
  std::vector<std::size_t> order(work.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return work[a] > work[b]; });
  std::vector<std::int64_t> load(static_cast<std::size_t>(ranks));
  std::vector<int> owners(work.size());
  for (const std::size_t piece : order) {
    const auto lightest = std::min_element(load.begin(), load.end());
    *lightest += work[piece];
    owners[piece] = static_cast<int>(lightest - load.begin());
  }
  return owners;
}

}  // namespace fsdp
