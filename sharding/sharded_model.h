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
#include "sharding/shard_layout.h"
#include "sharding/unit_cut.h"

namespace fsdp {

struct ShardedParameter {
  std::string name;
  std::vector<std::string> tied_names;
  at::Tensor tensor;                         // the module's own; its data is a view of the group's storage
  std::vector<std::int64_t> sizes, strides;  // as they were at fsdp::shard
  DType dtype = DType::kFloat32;
  int unit = 0, group = 0;  // group: index into ShardedModel::groups
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
struct FlatGroup {
  DType dtype = DType::kFloat32;
  bool trainable = false;
  std::vector<int> parameters;  // indices into ShardedModel::parameters
  std::unique_ptr<ShardLayout> layout;
  c10::intrusive_ptr<PagedStorage> storage;
  std::size_t slot_offset = 0;   // bytes, of the group's flat buffer in its unit's slot
  std::size_t shard_offset = 0;  // bytes, of its shard in the rank's parameter segment
  std::size_t state_offset = 0;  // bytes, of its shard in the gradient buffer and each state buffer

  std::size_t shard_bytes() const { return static_cast<std::size_t>(layout->shard_numel()) * size_of(dtype); }
  std::size_t flat_bytes() const { return static_cast<std::size_t>(layout->numel()) * size_of(dtype); }
};

struct UnitLayout {
  std::string name;
  std::vector<int> groups;
  std::vector<int> trainable;  // parameter indices
  std::size_t slot_bytes = 0;
};

class ShardedModel {
 public:
  // Lays the units out; touches no tensor yet. `owner` is told of every use of the storages made here and must outlive
  // them or orphan() them. Throws InvalidArgument by name for a parameter that cannot be sharded.
  ShardedModel(std::vector<CutUnit> units, const Mesh& mesh, StorageOwner* owner);

  std::vector<UnitLayout> units;
  std::vector<FlatGroup> groups;
  std::vector<ShardedParameter> parameters;
  std::size_t slot_bytes = 0;             // of the largest unit
  std::size_t parameter_shard_bytes = 0;  // per rank
  std::size_t state_shard_bytes = 0;      // of gradients, and of each optimizer state

  // Copies the values of a group's tensors into a flat buffer, gaps zeroed.
  void pack(const FlatGroup& group, std::byte* flat) const;
  // Makes the module's tensors views of the groups' storages and hooks the trainable ones.
  void take_over(const std::shared_ptr<GradientHook>& hook);
  // Gives the storages up: every later use of a parameter throws.
  void release();

  // Throws InvalidArgument by name if a parameter is no longer what take_over made it.
  void check_identity() const;
  void check_identity(const ShardedParameter& p) const;
  std::map<std::string, std::string> tied_names() const;  // further name -> the name in parameters
  const ShardedParameter& parameter_of(const at::Tensor& tensor) const {
    return parameters[index_of_.at(tensor.unsafeGetTensorImpl())];
  }
  // Of which parameter `tensor`, a view of `storage`, is a part.
  std::string parameter_name(const PagedStorage& storage, const at::Tensor& tensor) const;

 private:
  void add_unit(CutUnit unit);
  void lay_out(const Mesh& mesh);
  void make_storages(StorageOwner* owner);

  std::unordered_map<const void*, std::size_t> index_of_;
};

}  // namespace fsdp
