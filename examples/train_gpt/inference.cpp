#include "examples/train_gpt/inference.h"

#include <algorithm>
#include <random>

#include <ATen/core/grad_mode.h>

namespace gpt {

namespace {

constexpr std::int64_t kHeldOutWindows = 240;
constexpr std::int64_t kRowsPerPass = 12;

}  // namespace

torch::Tensor to_tensor(const Windows& windows) {
  auto tensor = torch::empty({windows.rows, windows.length}, torch::kByte);
  std::copy(windows.bytes.begin(), windows.bytes.end(), tensor.mutable_data_ptr<std::uint8_t>());
  return tensor;
}

double held_out_loss(GPT& model, const Corpus& corpus, const EvaluationGroup& group) {
  const torch::NoGradGuard no_grad;
  // Every rank makes equally many passes of equal shape, since a pass may be collective; one that has run out of windows
  // repeats the first and does not count it.
  const auto per_rank = (kHeldOutWindows + group.world_size - 1) / group.world_size;
  double sum = 0;
  for (std::int64_t done = 0; done < per_rank; done += kRowsPerPass) {
    const auto rows = std::min(kRowsPerPass, per_rank - done);
    std::vector<torch::Tensor> windows;
    std::vector<bool> counts;
    for (auto i = done; i < done + rows; ++i) {
      const auto index = i * group.world_size + group.rank;
      counts.push_back(index < kHeldOutWindows);
      windows.push_back(to_tensor(corpus.held_out_window(counts.back() ? index : 0, kHeldOutWindows)));
    }
    const auto losses = next_byte_loss(model, torch::cat(windows), Reduction::kPerWindow).to(torch::kDouble);
    for (std::int64_t row = 0; row < rows; ++row) {
      if (counts[static_cast<std::size_t>(row)]) sum += losses[row].item<double>();
    }
  }
  return group.mean(sum) * group.world_size / static_cast<double>(kHeldOutWindows);
}

std::string sample(GPT& model, const SampleOptions& options) {
  const torch::NoGradGuard no_grad;
  std::mt19937_64 random(static_cast<std::uint64_t>(options.seed));
  const auto context = model->config().context;
  auto text = torch::full({1, 1}, static_cast<std::int64_t>('\n'), torch::kLong);
  std::string written;
  for (std::int64_t i = 0; i < options.bytes; ++i) {
    const auto seen = text.narrow(1, std::max<std::int64_t>(text.size(1) - context, 0),
                                  std::min(text.size(1), context));
    const auto logits = model->forward(seen).select(1, -1).squeeze(0).to(torch::kDouble) / options.temperature;
    const auto cumulative = at::softmax(logits, 0).cumsum(0);
    // Uniform in [0, 1) from the top 53 bits: the same on every standard library.
    const double uniform = static_cast<double>(random() >> 11) * 0x1.0p-53;
    const auto byte = std::min<std::int64_t>((cumulative <= uniform).sum().item<std::int64_t>(), kVocabulary - 1);
    text = torch::cat({seen, torch::full({1, 1}, byte, torch::kLong)}, 1);
    written.push_back(static_cast<char>(byte));
  }
  return written;
}

}  // namespace gpt
