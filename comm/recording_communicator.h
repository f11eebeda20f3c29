// A communicator that another one stands behind: makes planned faults happen and reports every call.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <fsdp/testing.h>

#include "comm/peer_communicator.h"

namespace fsdp {

// Throws InvalidArgument for a fault that cannot happen to one of `world_size` ranks.
void check_faults(const FaultPlan& faults, int world_size);

class RecordingCommunicator final : public Communicator {
 public:
  // Called from the thread that made the call; may be empty.
  using OnRecord = std::function<void(int, const CommunicatorRecord&)>;

  RecordingCommunicator(std::shared_ptr<PeerCommunicator> inner, FaultPlan faults, OnRecord on_record);

  // This rank has died by plan.
  bool is_dead() const { return inner_->is_dead(); }

  int rank() const override { return inner_->rank(); }
  int world_size() const override { return inner_->world_size(); }
  const std::string& backend() const override { return inner_->backend(); }
  std::chrono::milliseconds timeout() const override { return inner_->timeout(); }

  std::unique_ptr<Segment> allocate(std::size_t bytes) override;
  std::unique_ptr<Board> allocate_board(int words) override;
  void all_gather(std::span<const std::byte> input, std::span<std::byte> output) override;
  void reduce_scatter(const std::byte* input, std::byte* output, std::int64_t numel, DType dtype) override;
  void all_reduce(std::byte* data, std::int64_t numel, DType dtype, ReduceOp op) override;
  void broadcast(std::span<std::byte> data, int root) override;
  void barrier() override;
  void gather(const GatherRequest& request) override;
  void reduce(const ReduceRequest& request) override;
  void read(const Segment& source, int rank, std::size_t offset, std::span<std::byte> output) override;
  void wait_until(const std::function<bool()>& ready, std::string_view what) override;
  // Neither recorded nor hit: they move nothing and wait for nobody.
  bool awaits(int rank, int other) const override { return inner_->awaits(rank, other); }
  void ring() override { inner_->ring(); }
  void abort(const std::string& reason) noexcept override {
    if (!is_dead()) inner_->abort(reason);
  }
  void check() override { inner_->check(); }
  void report_progress(const Progress& progress) override { inner_->report_progress(progress); }

 private:
  // A call that is about to be made; `record` lacks its times.
  template <class Body>
  void run(CommunicatorRecord record, const Body& body);
  // The number of the matching call, if the fault hits it.
  std::optional<int> hit(std::size_t fault, const CommunicatorRecord& record);
  void apply_before(const Fault& fault, int match, const CommunicatorRecord& record);

  std::shared_ptr<PeerCommunicator> inner_;
  const FaultPlan faults_;
  const OnRecord on_record_;
  std::vector<std::vector<std::string_view>> operations_;  // that each fault can happen in
  std::mutex mutex_;
  std::vector<int> matches_;  // of each fault, so far
};

}  // namespace fsdp
