// Takes gradients as backward makes them, packs them into buffers that all ranks can read, and reduces each unit's as
// soon as all ranks have it.
//
// NOTE [Gradient rounds]
// A unit's gradients come in rounds (NOTE [Step plan]). A round holds the taken tensors until a slot is open, packs
// them there, and when it ends is published; each rank then adds its own share of all ranks' buffers to its gradient
// shard. A round for which no slot is free stays held: the settlement, which all ranks reach, gives it one. Which
// gradients share a round depends on the program alone, never on timing.
//
// NOTE [Local gradients]
// Gradients of a unit that keeps them, and those that come within no_sync(), are added as they
// come, in fp32, to a whole buffer of this rank that peers can read. That buffer is published once: in the last round
// of the step, if the plan knows it, or in the first round outside of no_sync(); else by the settlement. From then on
// until the step ends it belongs to the reduction, and what still comes waits, as tensors added up, for the settlement.
//
// NOTE [Cleared gradients]
// Module::zero_grad between two backwards of a step is no collective: a rank sees it when the next gradient of the unit
// comes, or at the settlement. The round that comes next then restarts the parameter: each rank drops what its share had
// accumulated before it adds that round. This is right if every rank does so at the same generation, and no rank has
// newer gradients in an older one. A rank that has published nothing from that generation on restarts there at the
// settlement, which also finds where ranks do not fit, or one has cleared what is in a sum and no round restarts it;
// that is refused, since sums cannot be taken apart.
//
// NOTE [Ordered sums]
// The k-th micro-batch of rank r is k W + r of the step, and each has one generation of every unit, empty where it does
// not use the unit. A reduction continues the sum of the generation before, rank by rank, undivided:
//
//   W = 1   gen 1: 0 + m0   gen 2: + m1   gen 3: + m2   gen 4: + m3
//   W = 2   gen 1: 0 + m0 + m1            gen 2: + m2 + m3
//
// The sum begins with +0, so that an empty micro-batch and one of zeros leave the same bits.
//
// NOTE [Update in backward]
// The reduction of a unit's one round is followed at once by the optimizer, on the engine's thread, and all units have
// their gradient shares in the same memory. A round with gradients of all parameters on every rank may update them all;
// any other waits for the settlement, which tells what is used. A unit whose round has ended is closed until the step
// is over: nothing may read it, neither here nor, since all ranks have published, on any other rank.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "sharding/engine_core.h"
#include "sharding/pager.h"
#include "sharding/unit_state.h"

namespace fsdp {

// What Optimizer::step does with the gradients: ranks that differ in it would have different weights from here on.
struct StepTerms {
  double lr = 0;                                                // times the schedule's factor
  double max_grad_norm = 0, max_grad_value = 0, norm_type = 0;  // 0 = not asked for
  double on_non_finite = 0, loss_scale = 0, ema_decay = 0;
};

class GradientReducer {
 public:
  GradientReducer(EngineCore& core, Pager& pager);

  // REQUIRES the lock on core.mutex. The gradient of a trainable parameter; `restarts` are those of its unit of which
  // the user has cleared what had accumulated; `is_borrowed` if the tensor may be written by others once this returns.
  void take(std::unique_lock<std::mutex>& lock, int parameter, at::Tensor gradient, std::span<const int> restarts,
            bool is_borrowed);

  // Collective; `operation` is compared over ranks that go on with the step. Reduces all that is left over on any rank.
  // Afterwards used()[p] tells whether any rank holds a gradient of parameter p.
  struct Usage {
    std::vector<bool> used;     // by parameter: this rank holds a gradient
    std::vector<bool> cleared;  // or did, before the user cleared it, and none has come since
  };
  void settle(std::unique_lock<std::mutex>& lock, std::string_view operation, const Usage& usage,
              const StepTerms& terms = {});
  // After a settlement, before its gradients are used: throws InvalidArgument, on every rank, where terms differ, or
  // ranks have cleared a gradient at points that do not fit: NOTE [Cleared gradients].
  void check_agreement() const;
  // Collective, before another collective that does not settle: throws as settle() does where ranks differ in what they
  // call, or one gives the step up; else it changes nothing.
  void meet(std::unique_lock<std::mutex>& lock, std::string_view operation, const Usage& usage);
  const std::vector<bool>& used() const { return used_; }
  // Of each parameter, the sum of squares of the elements that this rank has summed: taken by the reduction itself, on
  // the engine's thread, so that a step's norm costs no pass of its own. Valid after settle(), but for ordered sums.
  const std::vector<double>& squares() const { return squares_; }
  // The next settlement throws StepFailed on every rank, after it has reduced what is left.
  void fail(const std::string& reason) { failure_ = reason.empty() ? "unknown error" : reason; }
  // The next reduction of each unit overwrites what has accumulated.
  void forget();

  // NOTE [Ordered sums]: the backward that comes next is of another micro-batch.
  void begin_micro_batch(std::unique_lock<std::mutex>& lock);

  // NOTE [Update in backward]: called on the engine's thread when a unit's mean gradient is whole. Unless `all_used`,
  // used() tells which parameters are.
  void update_with(std::function<void(int unit, bool all_used)> update) { update_ = std::move(update); }
  bool is_closed(int unit) const { return rounds_of_step(unit) > 0; }

  // Between the two, gradients accumulate locally. May nest. The first one is collective: it allocates.
  void begin_no_sync();
  void end_no_sync();
  bool has_local() const { return local_ != nullptr; }

  std::size_t local_bytes() const { return local_ != nullptr ? local_->bytes() : 0; }
  std::size_t held_bytes() const { return held_bytes_; }
  std::int64_t held_rounds() const { return held_rounds_; }
  std::size_t peak_overflow_bytes() const { return peak_overflow_bytes_; }

 private:
  struct Round {
    int unit = 0;
    GradientState state = GradientState::kEmpty;
    std::vector<at::Tensor> held;  // by trainable index; undefined = not come, or packed
    std::vector<bool> packed;
    std::vector<int> restarts;  // parameters: NOTE [Cleared gradients]
    bool waits = false;         // for the settlement
    bool local = false;         // accumulates in the local buffer: nothing is held, `packed` tells what is there
    int slot = kNoSlot;
    std::uint64_t generation = 0;
    bool accumulates = false;
  };
  struct UnitRounds {
    std::unique_ptr<Round> open;
    std::unique_ptr<Round> local;
    bool local_is_published = false;     // since the last step
    std::uint64_t generation = 0;        // of the last published round
    std::uint64_t first_generation = 0;  // the last one before what now accumulates
    int pending = 0;                     // ended rounds that wait for a slot
  };
  // What the ranks have told each other.
  struct Agreement {
    std::vector<std::uint64_t> generations;   // each unit's last over all ranks
    std::vector<std::uint64_t> restarted_at;  // by parameter: the generation, 0 = none
    std::vector<bool> used;                   // by parameter
    bool has_restarts = false;                // of any rank
    std::uint64_t overflow_slots = 0;         // the largest number of rounds that a rank has no slot for
    std::string failure;                      // of the first rank that gives the step up
    int failed_rank = -1;
    std::string refusal;  // of terms that differ, "" = none do
  };
  struct Announcement;
  // Published locations beside those in the arena: in the settlement's overflow segment, or the unit's local gradients.
  static constexpr std::uint64_t kInOverflow = std::uint64_t{1} << 63, kLocal = std::uint64_t{1} << 62;
  // Beside any of them: gradients of some parameters only. ReduceMailbox::kAbsent has this bit.
  static constexpr std::uint64_t kPartial = std::uint64_t{1} << 61;
  // Where a rank has the gradients of one group, and of which type.
  struct Buffer {
    const Segment* segment = nullptr;
    std::size_t offset = 0;  // bytes in its part
    DType dtype = DType::kFloat32;
    std::byte* local() const { return segment->local().data() + offset; }  // where the rank is this one
  };

  Buffer buffer_at(std::uint64_t location, const FlatGroup& group) const;
  std::unique_ptr<Round> make_round(int unit) const;
  bool accumulates_locally(int unit) const;
  void add_locally(const ShardedParameter& p, const at::Tensor& gradient, std::span<const int> restarts);
  void hold(std::unique_ptr<Round> round);
  void merge_late(std::unique_ptr<Round> round);
  Round& open_round(int unit);
  std::uint64_t rounds_of_step(int unit) const;
  // Throws InvalidArgument where the options of the model allow no further round.
  void check_may_open(int unit) const;
  void end_open_round(std::unique_lock<std::mutex>& lock, int unit);
  bool is_whole(const Round& round) const;
  bool may_publish(const Round& round) const;
  struct RoundEnd {
    int slot = kNoSlot;  // the planned one
    bool frees_unit = false;
    bool may_wait = true;  // for a slot to drain; else the mutex stays taken
  };
  void end_round(std::unique_lock<std::mutex>& lock, int unit, const RoundEnd& end);
  void open_slot(std::unique_lock<std::mutex>& lock, int unit, int planned_slot);
  int find_slot(std::unique_lock<std::mutex>& lock, int unit, int planned_slot, bool may_wait);
  void flush_pending();
  void pack_held(Round& round, std::uint64_t location);
  void pack(Round& round, std::size_t index, std::uint64_t location);
  void zero_missing(const Round& round, std::uint64_t location) const;
  // From its slot, or else into the overflow segment.
  void publish(std::unique_ptr<Round> round);
  void begin_generation(Round& round);
  // Of a rank that has no gradients for a generation.
  void publish_absent(int unit, std::vector<int> restarts);
  void enqueue_reduction(std::shared_ptr<Round> round);
  void reduce(const std::shared_ptr<Round>& round);
  void reduce_group(const Round& round, const FlatGroup& group);
  void update(const Round& round);
  // Widens the inputs of the narrower type where ranks published in two.
  DType unify(std::span<ReduceInput> inputs, std::span<const DType> dtypes, std::int64_t numel,
              std::vector<at::Tensor>& widened) const;
  void complete(Round& round);
  void take_squares(const FlatGroup& group);
  void restart(const Round& round);
  std::vector<std::byte> announce(const Announcement& announcement, const Usage& usage) const;
  Agreement agree(std::unique_lock<std::mutex>& lock, std::string_view operation, const Usage& usage,
                  const StepTerms& terms = {});
  std::string describe_difference(const StepTerms& first, const StepTerms& other, int rank) const;
  bool has_restarts(const Usage& usage) const;
  std::vector<std::uint64_t> restarts_here() const;
  void agree_on_restarts(std::unique_lock<std::mutex>& lock, Agreement& agreement, const Usage& usage);
  std::string describe_misplaced(const ShardedParameter& parameter, int rank) const;
  void drop_gradient(int parameter);
  void drop_unpublished();
  void reduce_rest(std::unique_lock<std::mutex>& lock, const Agreement& agreement, std::string_view operation);
  [[noreturn]] void fail_step(std::unique_lock<std::mutex>& lock, Agreement agreement);
  void publish_rest(std::unique_lock<std::mutex>& lock, int unit, const Agreement& agreement,
                    std::string_view operation);
  void wait_settled(std::unique_lock<std::mutex>& lock, int unit, std::uint64_t generation, std::string_view operation);

  EngineCore& core_;
  Pager& pager_;
  std::vector<UnitRounds> units_;
  std::deque<std::unique_ptr<Round>> pending_;
  std::unique_ptr<Segment> local_;     // whole gradients within no_sync(), of units that do not keep them
  int no_sync_ = 0;                    // scopes open
  std::unique_ptr<Segment> overflow_;  // during a settlement, for rounds without a slot
  std::uint64_t overflow_offset_ = 0;
  std::vector<bool> used_;
  std::vector<std::uint64_t> restarted_at_;  // by parameter, in this step; 0 = not
  std::string refusal_;                      // what check_agreement() throws, "" = all fits
  bool agreed_ = false;                      // used_ is of this step
  std::uint64_t micro_batches_ = 0;          // of this step
  std::function<void(int unit, bool all_used)> update_;
  std::vector<double> squares_;
  std::string failure_;
  std::size_t held_bytes_ = 0, peak_overflow_bytes_ = 0;
  std::int64_t held_rounds_ = 0;
};

}  // namespace fsdp
