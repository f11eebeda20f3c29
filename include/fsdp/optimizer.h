// Optimizers over this rank's flat shards: AdamW, Adam and SGD as one fused pass, Muon on whole matrices; LibTorch's
// own are in <fsdp/torch_optimizer.h>.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <fsdp/loss_scaler.h>
#include <fsdp/schedule.h>

namespace fsdp {

// Overrides for the parameters that `matches` accepts; the first group that matches a parameter's dotted name wins.
// `ndim` is its number of dimensions (biases and norms have 1).
struct ParameterGroup {
  std::function<bool(const std::string& name, std::int64_t ndim)> matches{};
  std::optional<double> weight_decay{};
  double lr_scale = 1.0;  // times the optimizer's lr
};
using ParameterGroups = std::vector<ParameterGroup>;

// Decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101), bias-corrected as in torch::optim::AdamW.
struct AdamW {
  double lr = 1e-3;
  std::array<double, 2> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 1e-2;
  ParameterGroups groups{};
};

// Adam (Kingma and Ba, arXiv:1412.6980), as torch::optim::Adam: weight decay is added to the gradient.
struct Adam {
  double lr = 1e-3;
  std::array<double, 2> betas{0.9, 0.999};
  double eps = 1e-8;
  double weight_decay = 0;
  ParameterGroups groups{};
};

// torch::optim::SGD without dampening: weight decay is added to the gradient.
struct SGD {
  double lr = 1e-3;
  double momentum = 0;
  double weight_decay = 0;
  bool nesterov = false;
  ParameterGroups groups{};
};

// Momentum whose update is made orthogonal (Jordan et al., "Muon", 2024) for matrices, AdamW for all else. An update
// needs the whole matrix, so each matrix has an owner, a rank: it puts the mean gradient together, keeps the momentum,
// and the others read the update from it. Owners are chosen so that ranks have equal work. An update is of the shape's
// scale sqrt(max(1, rows / columns)), with five Newton-Schulz iterations in fp32.
struct Muon {
  double lr = 0.02;
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0;
  // Which 2-dimensional parameters are meant, by dotted name. Embeddings and heads better are not. Default: all.
  std::function<bool(const std::string& name)> matches{};
  AdamW others{};  // the rest; its lr is times the same schedule
};

// What step() does where a gradient is NaN or infinite on any rank; all ranks decide alike, before anything changes.
enum class OnNonFinite {
  kFail,  // throws Error (kNonFinite) on every rank, naming the first bad parameter
  kSkip,  // drops the gradients; StepResult::skipped
  kStop,  // as kSkip, and StepResult::stop: leave the loop and save, the model is that of the step before
};

struct StepOptions {
  // Gradients are scaled so that their norm over all parameters of all ranks is at most this, as
  // torch::nn::utils::clip_grad_norm_ does. Positive.
  std::optional<double> max_grad_norm{};
  double norm_type = 2;  // p of that norm and of StepResult::grad_norm: above 0, infinity included
  // Each element of the mean gradient is clamped to [-value, value], as clip_grad_value_ does. Positive; not together
  // with max_grad_norm.
  std::optional<double> max_grad_value{};
  OnNonFinite on_non_finite = OnNonFinite::kFail;
  LossScaler* scaler = nullptr;  // borrowed for the call
};

// An exponential moving average of the weights: average = decay * average + (1 - decay) * weight after each step.
struct Ema {
  double decay = 0.999;
};

struct StepResult {
  double grad_norm = 0;  // before clipping and free of the loss's scale; the same bits on every rank
  bool skipped = false;
  bool stop = false;
  std::string first_bad_parameter{};  // empty where all were finite
};

class EngineState;

// Made by Engine::optimizer; the engine must outlive it. Not thread-safe.
class Optimizer {
 public:
  explicit Optimizer(EngineState& engine) : engine_(&engine) {}
  // Collective, the one point of a step that is alike on all ranks: finishes pending reductions, clips, updates the
  // shards, clears the gradients. Parameters that no rank used since the last step are left alone, decay included.
  // Throws CommunicationError, and InvalidArgument where a parameter's storage, hook or dispatch key is no longer the
  // engine's, and, on every rank, where ranks differ in learning rate, options, loss scale or average: with the rank and
  // both values, before anything is updated, so that the corrected call goes on.
  StepResult step(const StepOptions& options = {});
  // Drops the gradients accumulated so far. Collective. torch::nn::Module::zero_grad works too, if every rank calls
  // it; unlike in plain LibTorch a parameter that is zeroed in place and gets no new gradient counts as unused: the
  // step leaves it alone.
  void zero_grad();
  // Before the schedule's factor and the groups' lr_scale.
  void set_lr(double lr);
  double lr() const;
  // Each step's learning rate is lr() times schedule(Engine::step()). The same function on every rank.
  void set_schedule(Schedule schedule);

 private:
  EngineState* engine_;
};

}  // namespace fsdp
