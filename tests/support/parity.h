// Runs the same training in one process with plain LibTorch (REF) and sharded over ranks, and compares.
#pragma once

#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/fsdp.h>
#include <fsdp/testing.h>

#include "tests/support/test_models.h"

namespace fsdp::testing {

using Tensors = std::map<std::string, at::Tensor>;  // by dotted name, whole and plain

// What a training run showed.
struct Trace {
  std::vector<double> losses;      // mean over the global batch
  std::vector<Tensors> gradients;  // of each step, before it; parameters that have none are left out
  Tensors parameters;              // after the last step
};

struct Training {
  std::function<std::shared_ptr<LossModel>()> make_model;  // the same values each time it is called
  std::function<Batch(int step)> batch;                    // global; divides by the world size
  int steps = 5;
  // Forward and backward on this rank's part; returns the loss. Default: loss(), backward().
  std::function<double(LossModel&, const Batch&)> run_step{};
  ShardOptions options{};
  bool adamw = false;        // else SGD with lr 0.1
  bool own_kernels = false;  // train_plain steps with our kernels on whole tensors
  RunRanksOptions ranks{};
};

// MixedModel with its blocks, LSTM and convolution as units, over 12 sequences a step.
Training mixed_training();

Trace train_plain(const Training& training);
// For test names: "Threads", "Shm", "Tcp".
std::string name_of_backend(const std::string& backend);

std::mutex& drawing_mutex();
// `make()`, one rank at a time: modules draw from the process's one generator, which thread ranks share.
template <class Make>
auto in_turn(const Make& make) {
  const std::lock_guard lock(drawing_mutex());
  return make();
}

// Ranks as threads of this process.
Trace train_sharded(const Training& training, int world_size);
// This rank's run; losses and gradients are filled on rank 0 only.
Trace train_rank(const Context& context, const Training& training, const std::shared_ptr<LossModel>& model);

// Each expectation names the tensor. tolerance 0 = the same bits.
void expect_equal(const at::Tensor& actual, const at::Tensor& expected, double absolute, double relative,
                  const std::string& name);
void expect_same(const Trace& actual, const Trace& expected, double absolute = 1e-6, double relative = 1e-5,
                 bool parameters = true);
void expect_bit_equal(const Trace& actual, const Trace& expected);

// Rank r's equal part of a global batch.
Batch part_of(const Batch& batch, int rank, int world_size);

// Whole tensors from all ranks' views; the same on every rank. `views` as Engine::gradient_views or shard_views gives
// them.
Tensors assemble(const Context& context, const std::vector<ShardView>& views);

// Whole parameters of a sharded (or plain) module, read through operators.
Tensors parameters_of(const torch::nn::Module& module);

}  // namespace fsdp::testing
