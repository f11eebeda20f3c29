// Random numbers keyed by (seed, draw, element): any range of a draw can be made by itself, on any rank. The generator
// is Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11). No torch.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include <fsdp/dtype.h>

namespace fsdp {

std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter, std::array<std::uint32_t, 2> key);

struct RandomDraw {
  std::uint64_t seed = 0, draw = 0;
};

// Elements [begin, begin + numel) of a draw, into `output`; of a floating-point type. Made in fp64 and rounded.
void fill_uniform(std::byte* output, DType dtype, std::int64_t begin, std::int64_t numel, const RandomDraw& draw,
                  double from, double to);
// By the method of Box and Muller.
void fill_normal(std::byte* output, DType dtype, std::int64_t begin, std::int64_t numel, const RandomDraw& draw,
                 double mean, double deviation);
void fill_value(std::byte* output, DType dtype, std::int64_t numel, double value);

}  // namespace fsdp
