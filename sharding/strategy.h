// What the options of each unit mean for its buffers.
//
// NOTE [Strategies]
// Two questions decide all: are whole parameters kept from their first use in a step to its end, and are whole
// gradients kept until its last backward? Sharded optimizer state follows from the number of shares alone.
//
//                     shares   keeps parameters   keeps gradients
//   kReplicate        1        yes                yes
//   kShardOptimizer   S        yes                yes
//   kShardGradients   S        yes                no
//   kFullShard        S        no                 no
//
// What is kept lies whole in the segment that otherwise has shares only, with the rank's own share in its place there.
// So a gather reads only the others' shares, a reduction writes only the own one, and nothing is held twice. With one
// share all of it is the own share, and a step leaves nothing stale.
#pragma once

#include <vector>

#include <fsdp/dtype.h>
#include <fsdp/options.h>

#include "sharding/unit_cut.h"

namespace fsdp {

struct UnitPolicy {
  Strategy strategy = Strategy::kFullShard;
  int shares = 1;
  bool keeps_parameters = false;
  bool keeps_gradients = false;
  bool keeps_gradient_shares = true;  // else they are gone once the unit is updated, in backward
  DType param = DType::kFloat32;      // of what was fp32
  DType reduce = DType::kFloat32;     // at most this wide while gradients travel
};

// One for each unit. Throws InvalidArgument, naming the unit and both options, for a combination that has no meaning.
std::vector<UnitPolicy> resolve_policies(const std::vector<CutUnit>& units, const ShardOptions& options,
                                         int world_size);

std::string_view name_of(Strategy strategy);

}  // namespace fsdp
