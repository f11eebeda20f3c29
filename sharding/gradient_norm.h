// The norm of the whole gradient, and what else all ranks decide on together before a step.
#pragma once

#include <vector>

#include "sharding/engine_core.h"
#include "sharding/exact_sum.h"

namespace fsdp {

// What this rank has added up of Engine::weigh since the last step.
struct SampleCount {
  ExactSum samples;
  bool weighed = false;    // some loss
  bool unweighed = false;  // there are gradients, but no loss was weighed
};

struct GradientSummary {
  double norm = 0;     // p-norm of the mean over ranks of the used parameters' gradients
  int first_bad = -1;  // the first parameter whose gradient is not finite, -1 = none
  // What turns that mean into the one asked for: 1, or world size / samples of all ranks. Under ordered sums norm and
  // weight are those of sums, so 1 / samples.
  double weight = 1;
};

// Collective; the same bits on every rank. `squares` are those that the reductions took, which is all that p = 2 needs;
// any other norm, and ordered sums, read the gradients once more. Throws InvalidArgument where some ranks weigh their losses and others
// do not.
GradientSummary summarize_gradients(const EngineCore& core, const std::vector<bool>& used,
                                    const std::vector<double>& squares, double p, const SampleCount& own);

}  // namespace fsdp
