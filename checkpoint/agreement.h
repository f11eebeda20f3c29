// Work that all ranks must come out of alike: where it fails on one, every rank throws the same error.
#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include <fsdp/communicator.h>

namespace fsdp {

// Collective. Runs `work` on every rank and returns all results by rank. `what` names the operation ("save of step 120
// to runs/a"). If it throws anywhere, every rank throws CheckpointError "<what> failed on rank R: <reason>", R the
// lowest that failed. REQUIRES work without collectives.
std::vector<std::string> on_all_ranks(Communicator& communicator, std::string_view what,
                                      const std::function<std::string()>& work);

// Collective. Runs `work` on rank 0 alone and returns its result on every rank; a failure as above.
std::string on_rank_zero(Communicator& communicator, std::string_view what, const std::function<std::string()>& work);

}  // namespace fsdp
