// Muon: whole matrices, each updated by the rank that owns it (NOTE [Owner placement]).
#pragma once

#include "sharding/fused_optimizer.h"

namespace fsdp {

// The matrix nearest to orthogonal, roughly: five Newton-Schulz iterations with the coefficients of Jordan et al.
// [rows, columns], fp32.
at::Tensor orthogonalized(const at::Tensor& matrix);

class MuonOptimizer final : public ShardedOptimizer {
 public:
  MuonOptimizer(EngineCore& core, Muon options);

  void visit_settings(const SettingVisitor& visit) override;
  void allocate() override;
  void set_lr(double lr) override;
  double lr() const override { return options_.lr; }
  std::size_t state_bytes() const override;
  std::size_t unsharded_state_bytes() const override;
  void append_views(std::vector<ShardView>& views) const override;
  std::int64_t steps_of(std::size_t parameter) const override { return others_.steps_of(parameter); }
  void set_steps_of(std::size_t parameter, std::int64_t steps) override { others_.set_steps_of(parameter, steps); }

 private:
  struct Matrix {
    std::size_t parameter = 0;
    int owner = 0;
    std::size_t update_offset = 0;  // bytes, in the owner's part of updates_
    at::Tensor momentum;            // on the owner
  };
  void prepare(std::span<const int> parameters, const std::vector<bool>& used, const StepSettings& settings) override;
  void update_run(std::size_t parameter, std::int64_t begin, std::int64_t numel) override;
  void describe_rest(std::vector<std::string>& lines) const override;
  void place_matrices();
  void compute_update(Matrix& matrix);
  void validate() const;
  bool is_matrix(const ShardedParameter& p) const;

  Muon options_;
  FusedOptimizer others_;
  StepSettings settings_;
  std::vector<Matrix> matrices_;
  std::vector<int> matrix_of_;        // by parameter, -1 = among the others
  std::size_t update_bytes_ = 0;      // the most that a rank computes
  std::unique_ptr<Segment> updates_;  // each rank's orthogonal updates, fp32
};

}  // namespace fsdp
