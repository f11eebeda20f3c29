// One source loop, compiled for three x86-64 levels, the best one chosen at load time. Files that use it are built
// with -O3 -ffp-contract=off, so every level gives the same bits (NOTE [Same bits on every level],
// sharding/CMakeLists.txt).
#pragma once

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define FSDP_VECTOR_DISPATCH  // the resolvers run before a sanitizer's runtime is ready
#else
#define FSDP_VECTOR_DISPATCH __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#endif
