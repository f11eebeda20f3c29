// The same training as in sharded_training.h, in plain LibTorch: what libfsdp is compared with.
#pragma once

#include "examples/train_gpt/allocation_counter.h"
#include "examples/train_gpt/corpus.h"
#include "examples/train_gpt/options.h"
#include "examples/train_gpt/report.h"
#include "examples/train_gpt/summary.h"

namespace gpt {

Summary train_plain(const Options& options, const Corpus& corpus, AllocationCounter& allocations, Report& report);

}  // namespace gpt
