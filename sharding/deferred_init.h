// The fallback's side of fsdp::deferred_init.
#pragma once

#include <ATen/core/stack.h>

#include <string_view>

namespace fsdp {

// How an operator makes or fills tensors, as far as that can be noted down.
enum class FillingOperator { kNone, kEmpty, kZeros, kOnes, kFull, kRand, kRandn, kUniform, kNormal, kFill, kZero };
FillingOperator filling_operator(std::string_view name, std::string_view overload);

// This thread is within a DeferredInitScope.
bool defers_initialisation();
// Does the operator's work by a note, or by keyed random numbers; false where it has to run.
bool note_down(FillingOperator op, std::size_t arguments, torch::jit::Stack* stack);

}  // namespace fsdp
