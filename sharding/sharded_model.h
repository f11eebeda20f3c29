// The sharded parameters of one module: units, their groups, and each parameter. Who lies where; no paging, no
// reductions.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>

#include <fsdp/dtype.h>

#include "memory/torch_compat.h"
#include "memory/torch_storage.h"
#include "sharding/mesh.h"
#include "sharding/optimizer_kernels.h"
#include "sharding/shard_layout.h"
#include "sharding/strategy.h"
#include "sharding/unit_cut.h"

namespace fsdp {

struct ShardedParameter {
  std::string name;
  std::vector<std::string> tied_names;
  at::Tensor tensor;                         // the module's own; its data is a view of the group's storage
  std::vector<std::int64_t> sizes, strides;  // as they were at fsdp::shard
  int unit = 0, group = 0;                   // group: index into ShardedModel::groups
  std::size_t index_in_group = 0;
  int trainable_index = -1;  // among the trainable parameters of its unit; -1 = frozen
  ShardPiece piece;          // what this rank owns
  const void* hook = nullptr;
  // What stands in .grad once the gradient has been taken, and its storage; see GradientReducer.
  at::Tensor placeholder;
  c10::intrusive_ptr<PagedStorage> gradient_storage;
  // `grad` is the placeholder, or what zero_grad(false) makes of it: a detached view.
  bool is_placeholder(const at::Tensor& grad) const {
    return grad.defined() && grad.has_storage() && grad.storage().unsafeGetStorageImpl() == gradient_storage.get();
  }
};

// The parameters of one unit that share dtype and requires_grad: one flat buffer, gathered in one piece.
//
// NOTE [Master weights]
// Under mixed precision a group has two types: `dtype`, which parameters and their gradients have and gathers carry,
// and `master_dtype`, which they had before fsdp::shard. The owner of a share keeps it in both; the master counts: the
// optimizer updates it and rounds it into the other in the same pass, checkpoints hold it. Else the two are one.
struct FlatGroup {
  int unit = 0;
  DType dtype = DType::kFloat32, master_dtype = DType::kFloat32;
  DType reduce_dtype = DType::kFloat32;  // of gradients in a slot; at most as wide as dtype
  bool trainable = false;
  std::vector<int> parameters;  // indices into ShardedModel::parameters
  std::unique_ptr<ShardLayout> layout;
  c10::intrusive_ptr<PagedStorage> storage;
  // Bytes. A stride is the distance between the shares of two ranks in a segment: 0 where each holds its own only.
  std::size_t slot_offset = 0;                             // of the flat buffer in the unit's
  std::size_t parameter_offset = 0, parameter_stride = 0;  // of share 0 in the parameter segment
  std::size_t gradient_offset = 0, gradient_stride = 0;    // of share 0 in the gradient segment
  std::size_t master_offset = 0;                           // of the own share in the master segment
  std::size_t state_offset = 0;                            // of the own share in each optimizer state
  std::size_t local_offset = 0;  // of the whole gradients in the segment where they accumulate locally

  bool has_master() const { return master_dtype != dtype; }
  std::size_t shard_bytes() const { return bytes_of(layout->shard_numel(), dtype); }
  std::size_t flat_bytes() const { return bytes_of(layout->numel(), dtype); }
  DType gradient_dtype() const { return state_dtype(dtype); }
};

struct UnitLayout {
  std::string name;
  UnitPolicy policy;
  Mesh mesh;
  std::vector<int> groups;
  std::vector<int> trainable;        // parameter indices
  std::size_t bytes = 0;             // of the flat buffers of all groups
  std::size_t parameter_offset = 0;  // of these in the parameter segment, where the unit keeps its parameters
  std::size_t local_offset = 0;      // of its gradients in the segment where they accumulate locally
};

class ShardedModel {
 public:
  // Lays the units out; touches no tensor yet. `owner` is told of every use of the storages made here and must outlive
  // them or orphan() them. Throws InvalidArgument by name for a parameter that cannot be sharded.
  ShardedModel(std::vector<CutUnit> units, const std::vector<UnitPolicy>& policies, int world_size, int rank,
               StorageOwner* owner);

  std::vector<UnitLayout> units;
  std::vector<FlatGroup> groups;
  std::vector<ShardedParameter> parameters;
  // Bytes per rank.
  std::size_t largest_unit_bytes = 0;
  std::size_t slot_bytes = 0;                                             // of the largest unit that needs slots
  std::size_t parameter_bytes = 0, master_bytes = 0, gradient_bytes = 0;  // of the segments
  std::size_t local_bytes = 0;  // of whole gradients of units that do not keep them
  std::size_t state_bytes = 0;  // of each optimizer state

  const UnitLayout& unit_of(const FlatGroup& group) const { return units[static_cast<std::size_t>(group.unit)]; }
  const FlatGroup& group_of(const ShardedParameter& p) const { return groups[static_cast<std::size_t>(p.group)]; }

  // Makes the module's tensors views of the groups' storages and hooks the trainable ones.
  void take_over(const std::shared_ptr<GradientHook>& hook);
  // Gives the storages up: every later use of a parameter throws.
  void release();

  // Throws InvalidArgument by name if a parameter is no longer what take_over made it.
  void check_identity() const;
  void check_identity(const ShardedParameter& p) const;
  bool holds(const at::Tensor& tensor) const { return index_of_.count(tensor.unsafeGetTensorImpl()) > 0; }
  const ShardedParameter& parameter_of(const at::Tensor& tensor) const {
    return parameters[index_of_.at(tensor.unsafeGetTensorImpl())];
  }
  // Of which parameter `tensor`, a view of `storage`, is a part.
  std::string parameter_name(const PagedStorage& storage, const at::Tensor& tensor) const;

 private:
  void add_unit(CutUnit unit, const UnitPolicy& policy, const Mesh& mesh);
  std::size_t lay_out(UnitLayout& unit);
  void place(FlatGroup& group, const UnitLayout& unit, std::size_t& transient_end);
  void make_storages(StorageOwner* owner);

  std::unordered_map<const void*, std::size_t> index_of_;
};

}  // namespace fsdp
