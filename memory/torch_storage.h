// Storages whose memory comes and goes. A parameter group has one; so has each gradient that was taken away.
//
// NOTE [Paged storage]
// nbytes never changes: with 0, views of an absent parameter would throw. An absent storage has a null pointer and a
// text that LibTorch throws to whoever reads it past the dispatcher; views, saved tensors and the parameter itself
// share the storage, so one swap serves them all. The owner is found through the storage's own type: no table of
// storages, nothing global.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

namespace fsdp {

class PagedStorage;

// One operator as the owner of a storage sees it.
struct OperatorUse {
  std::string_view name;                    // "aten::addmm"
  std::span<PagedStorage* const> storages;  // of this owner, each once, in the order of the arguments
  bool writes = false;                      // to one of them
};

// Who pages a storage in. Called from any thread that runs operators.
class StorageOwner {
 public:
  virtual ~StorageOwner() = default;
  // Makes the storages readable until `release`. Throws what went wrong; then nothing is held.
  virtual void acquire(const OperatorUse& use) = 0;
  // `completed` is false where the operator threw.
  virtual void release(const OperatorUse& use, bool completed) = 0;
  // An operator meets the placeholder of a gradient: an accumulation (`added` is defined), a clearing (it is not), or
  // anything else (throws).
  virtual void accumulate_gradient(PagedStorage& storage, const at::Tensor& added) = 0;
  virtual void clear_gradient(PagedStorage& storage) = 0;
  // Of which parameter a view of the storage is a part; for errors.
  virtual std::string parameter_name(const PagedStorage& storage, const at::Tensor& tensor) const = 0;
};

class PagedStorage : public c10::StorageImpl {
 public:
  enum class Role { kParameters, kGradient };

  PagedStorage(std::size_t nbytes, Role role, StorageOwner* owner, int index, std::string absent_text);

  // nullptr where the tensor's storage is not one of ours.
  static PagedStorage* of(const at::Tensor& tensor);

  Role role() const { return role_; }
  int index() const { return index_; }
  // nullptr once the engine is gone.
  StorageOwner* owner() const { return owner_; }
  // What a reader is told while the bytes are away.
  const std::string& absent_text() const { return absent_text_; }
  void orphan(std::string absent_text);

  void point_at(void* data);
  void point_away();

 private:
  Role role_;
  StorageOwner* owner_;
  int index_;
  std::string absent_text_;
};

}  // namespace fsdp
