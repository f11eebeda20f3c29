// What is done with a model whose weights stay as they are: held-out loss and sampling. Works on sharded and plain models alike.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "examples/train_gpt/corpus.h"
#include "examples/train_gpt/model.h"

namespace gpt {

// Where this process stands among those that evaluate together. `mean` gives all of them the mean of their values.
struct EvaluationGroup {
  int rank = 0, world_size = 1;
  std::function<double(double)> mean = [](double value) { return value; };
};

// The same windows, and so the same figure up to rounding, for any number of ranks.
double held_out_loss(GPT& model, const Corpus& corpus, const EvaluationGroup& group = {});

struct SampleOptions {
  std::int64_t bytes = 0;
  std::int64_t seed = 0;
  double temperature = 0.8;
};

// Continues a line feed, byte by byte. The same text on every rank, for equal weights.
std::string sample(GPT& model, const SampleOptions& options);

// (rows, length) uint8.
torch::Tensor to_tensor(const Windows& windows);

}  // namespace gpt
