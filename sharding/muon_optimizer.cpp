#include "sharding/muon_optimizer.h"

#include <algorithm>
#include <cmath>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>
#include <fmt/format.h>

#include "sharding/owner_placement.h"

namespace fsdp {

at::Tensor orthogonalized(const at::Tensor& matrix) {
  const bool tall = matrix.size(0) > matrix.size(1);
  at::Tensor x = tall ? matrix.t() : matrix;
  x = x / (x.norm() + 1e-7);
  for (int iteration = 0; iteration < 5; ++iteration) {
    const at::Tensor gram = x.mm(x.t());
    x = at::addmm(x, at::addmm(gram, gram, gram, -4.7750, 2.0315), x, 3.4445, 1);
  }
  return tall ? x.t() : x;
}

MuonOptimizer::MuonOptimizer(EngineCore& core, Muon options)
    : ShardedOptimizer(core),
      options_(std::move(options)),
      others_(core, options_.others, [this](const ShardedParameter& p) { return !is_matrix(p); }),
      matrix_of_(core.model.parameters.size(), -1) {
  validate();
  place_matrices();
}

void MuonOptimizer::validate() const {
  require_option(is_non_negative(options_.lr), "lr", options_.lr, "at least 0");
  require_option(options_.momentum >= 0 && options_.momentum < 1, "momentum", options_.momentum, "in [0, 1)");
  require_option(is_non_negative(options_.weight_decay), "weight_decay", options_.weight_decay, "at least 0");
}

void MuonOptimizer::visit_settings(const SettingVisitor& visit) {
  visit("Muon.lr", options_.lr);
  visit("Muon.momentum", options_.momentum);
  visit("Muon.weight_decay", options_.weight_decay);
  validate();
  others_.visit_settings(visit);
}

bool MuonOptimizer::is_matrix(const ShardedParameter& p) const {
  return p.trainable_index >= 0 && p.sizes.size() == 2 && p.tensor.numel() > 0 &&
         core_.model.group_of(p).gradient_dtype() == DType::kFloat32 && (!options_.matches || options_.matches(p.name));
}

void MuonOptimizer::place_matrices() {
  std::vector<std::int64_t> work;
  for (std::size_t i = 0; i < matrix_of_.size(); ++i) {
    const ShardedParameter& p = core_.model.parameters[i];
    if (!is_matrix(p)) continue;
    matrix_of_[i] = static_cast<int>(matrices_.size());
    matrices_.push_back({.parameter = i, .momentum = {}});
    work.push_back(p.tensor.numel() * std::min(p.sizes[0], p.sizes[1]));  // of a product with the Gram matrix
  }
  const std::vector<int> owners = place_owners(work, core_.context.world_size());
  std::vector<std::size_t> bytes(static_cast<std::size_t>(core_.context.world_size()));
  for (std::size_t m = 0; m < matrices_.size(); ++m) {
    Matrix& matrix = matrices_[m];
    const ShardedParameter& p = core_.model.parameters[matrix.parameter];
    std::size_t& end = bytes[static_cast<std::size_t>(owners[m])];
    matrix.owner = owners[m];
    matrix.update_offset = end;
    end += bytes_of(p.tensor.numel(), DType::kFloat32);
    if (matrix.owner == core_.context.rank()) matrix.momentum = at::zeros(p.sizes);
  }
  update_bytes_ = *std::max_element(bytes.begin(), bytes.end());
}

void MuonOptimizer::allocate() { updates_ = core_.communicator().allocate(update_bytes_); }

void MuonOptimizer::describe_rest(std::vector<std::string>& lines) const {
  lines.push_back(fmt::format("Muon.nesterov {}", options_.nesterov));
  for (const Matrix& matrix : matrices_)
    lines.push_back(fmt::format("Muon for {}", core_.model.parameters[matrix.parameter].name));
  others_.describe_rest(lines);
}

void MuonOptimizer::prepare(std::span<const int> parameters, const std::vector<bool>& used,
                            const StepSettings& settings) {
  const at::NoGradGuard no_grad;
  settings_ = settings;
  std::vector<bool> others = used;
  for (Matrix& matrix : matrices_) {
    others[matrix.parameter] = false;
    if (used[matrix.parameter] && matrix.owner == core_.context.rank()) compute_update(matrix);
  }
  others_.prepare(parameters, others, settings);
  core_.communicator().barrier();  // every update is there; the step's last barrier lets the next ones overwrite them
}

void MuonOptimizer::compute_update(Matrix& matrix) {
  const ShardedParameter& p = core_.model.parameters[matrix.parameter];
  at::Tensor gradient = core_.whole_gradient(p);
  if (settings_.gradient.scale != 1) gradient.mul_(settings_.gradient.scale);
  if (std::isfinite(settings_.gradient.limit)) gradient.clamp_(-settings_.gradient.limit, settings_.gradient.limit);
  matrix.momentum.lerp_(gradient, 1 - options_.momentum);
  const at::Tensor direction = options_.nesterov ? gradient.lerp_(matrix.momentum, options_.momentum) : matrix.momentum;
  make_plain_view(updates_->local().data() + matrix.update_offset, p.tensor, DType::kFloat32)
      .copy_(orthogonalized(direction));
}

void MuonOptimizer::update_run(std::size_t parameter, std::int64_t begin, std::int64_t numel) {
  if (matrix_of_[parameter] < 0) return others_.update_run(parameter, begin, numel);
  const Matrix& matrix = matrices_[static_cast<std::size_t>(matrix_of_[parameter])];
  const ShardedParameter& p = core_.model.parameters[parameter];
  const FlatGroup& group = core_.model.group_of(p);
  const std::int64_t offset = p.piece.shard_offset + begin;
  std::vector<std::byte> update(bytes_of(numel, DType::kFloat32));
  core_.communicator().read(*updates_, matrix.owner,
                            matrix.update_offset + bytes_of(p.piece.begin + begin, DType::kFloat32), update);
  const double shape_scale = std::sqrt(
      std::max(1.0, static_cast<double>(p.sizes[0]) / static_cast<double>(p.sizes[1])));
  sgd_update({.dtype = group.master_dtype,
              .parameter = core_.master_shard(group) + bytes_of(offset, group.master_dtype),
              .gradient = update.data(),
              .numel = numel,
              .rounded = group.has_master() ? core_.parameter_shard(group) + bytes_of(offset, group.dtype) : nullptr,
              .rounded_dtype = group.dtype},
             {.lr = options_.lr * settings_.lr_factor,
              .weight_decay = options_.weight_decay,
              .gradient = {.scale = shape_scale}});
}

void MuonOptimizer::set_lr(double lr) {
  require_option(is_non_negative(lr), "lr", lr, "at least 0");
  options_.lr = lr;
}

std::size_t MuonOptimizer::state_bytes() const {
  std::size_t bytes = others_.state_bytes() + updates_->bytes();
  for (const Matrix& matrix : matrices_) bytes += matrix.momentum.defined() ? matrix.momentum.nbytes() : 0;
  return bytes;
}

std::size_t MuonOptimizer::unsharded_state_bytes() const {
  std::size_t bytes = others_.unsharded_state_bytes();
  for (const Matrix& matrix : matrices_)
    bytes += bytes_of(core_.model.parameters[matrix.parameter].tensor.numel(), DType::kFloat32);
  return bytes;
}

void MuonOptimizer::append_views(std::vector<ShardView>& views) const {
  others_.append_views(views);
  for (const Matrix& matrix : matrices_) {
    const ShardedParameter& p = core_.model.parameters[matrix.parameter];
    const bool own = matrix.momentum.defined();
    views.push_back({.name = "momentum." + p.name,
                     .kind = ShardKind::kOptimizer,
                     .dtype = DType::kFloat32,
                     .shape = p.sizes,
                     .strides = {p.sizes[1], 1},
                     .begin = 0,
                     .end = own ? p.tensor.numel() : 0,
                     .data = own ? static_cast<std::byte*>(matrix.momentum.mutable_data_ptr()) : nullptr,
                     .replica = 0});
  }
}

}  // namespace fsdp
