// Run by `fsdp run -n 2`: ranks as processes have the bits of ranks as threads, and equal plain LibTorch.
#include <gtest/gtest.h>

#include "tests/support/parity.h"

namespace fsdp::testing {
namespace {

TEST(ShmProcessesTest, EqualPlainLibTorchAndHaveTheBitsOfThreads) {
  const Context context = init();
  ASSERT_EQ(context.world_size(), 2) << "start me with fsdp run -n 2";
  ASSERT_EQ(context.backend(), "shm");
  for (const bool adamw : {false, true}) {
    Training training = mixed_training();
    training.adamw = adamw;
    const Trace processes = train_rank(context, training, training.make_model());
    if (context.is_main()) {
      if (!adamw) expect_same(processes, train_plain(training));
      expect_bit_equal(processes, train_sharded(training, 2));
    }
    context.communicator().barrier();
  }
}

}  // namespace
}  // namespace fsdp::testing
