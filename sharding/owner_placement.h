// Which rank owns which whole tensor. Integers only.
//
// NOTE [Owner placement]
// The heaviest piece of work first, each to the rank with the least so far (Graham's longest-processing-time rule, at
// most 4/3 of the best possible load); ties go to the lower index and the lower rank, so every rank finds the same.
// Work 7 5 4 4 2 on 2 ranks:
//
//   rank 0   7         4     = 11
//   rank 1     5   4       2 = 11
#pragma once

#include <cstdint>
#include <vector>

namespace fsdp {

// The owner of each piece. REQUIRES ranks > 0.
std::vector<int> place_owners(const std::vector<std::int64_t>& work, int ranks);

}  // namespace fsdp
