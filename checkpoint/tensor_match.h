// Whether a set of views can be loaded from what a file offers.
#pragma once

#include <cstddef>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include <fsdp/shard_view.h>

#include "checkpoint/manifest.h"

namespace fsdp {

// Throws CheckpointError with the tensor's name for a view that cannot be saved or loaded: a name that may not stand in
// a file or stands twice, a gradient, strides that are not dense, a range outside the tensor, no data.
void check_views(std::span<const ShardView> views);

// Names that stand for others.
struct Aliases {
  std::multimap<std::string, std::string> instead;  // view's name -> offered names that serve as well
  std::set<std::string> not_needed;                 // offered names that no view has to ask for
};

// For each view the index of the offered tensor it reads. Throws CheckpointError with all differences in one message
// (missing with nearest name, unexpected, shape, dtype) where not every view finds its tensor or not every tensor its
// view.
std::vector<std::size_t> match_views(std::span<const ShardView> views, std::span<const ManifestTensor> offered,
                                     const Aliases& aliases);

}  // namespace fsdp
