// Learning-rate schedules: what the learning rate is multiplied by in each step. Functions of the step alone, so a
// resumed run goes on where it was.
#pragma once

#include <cstdint>
#include <functional>

namespace fsdp {

// Of the number of steps taken before the one that is to be made: 0 for the first.
using Schedule = std::function<double(std::int64_t step)>;

// 1/warmup_steps, 2/warmup_steps, ... 1, then along half a cosine (arXiv:1608.03983) to final_factor at total_steps,
// and constant from there on. Throws InvalidArgument where total_steps is not above warmup_steps, or a value is
// negative.
Schedule warmup_cosine(std::int64_t warmup_steps, std::int64_t total_steps, double final_factor = 0);
// The same rise, then along a straight line.
Schedule warmup_linear(std::int64_t warmup_steps, std::int64_t total_steps, double final_factor = 0);
// factor^(step / every): one step down after each `every` steps.
Schedule step_decay(std::int64_t every, double factor);

}  // namespace fsdp
