// The training with libfsdp: the file to read first.
#pragma once

#include <fsdp/context.h>

#include "examples/train_gpt/allocation_counter.h"
#include "examples/train_gpt/corpus.h"
#include "examples/train_gpt/options.h"
#include "examples/train_gpt/report.h"
#include "examples/train_gpt/summary.h"

namespace gpt {

// Trains, or with --load only evaluates, and samples. Collective: every rank calls it with the same options and text.
Summary train_sharded(const fsdp::Context& context, const Options& options, const Corpus& corpus,
                      AllocationCounter& allocations, Report& report);

}  // namespace gpt
