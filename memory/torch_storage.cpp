#include "memory/torch_storage.h"

namespace fsdp {
namespace {

// LibTorch 2.11 can make a storage throw a text to raw readers, but has no call that undoes it. The flag is private; an
// explicit instantiation may name it.
bool& throws_on_read(c10::StorageImpl& storage);
template <bool c10::StorageImpl::*flag>
struct ThrowsOnRead {
  friend bool& throws_on_read(c10::StorageImpl& storage) { return storage.*flag; }
};
template struct ThrowsOnRead<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

}  // namespace

PagedStorage::PagedStorage(std::size_t nbytes, Role role, StorageOwner* owner, int index, std::string absent_text)
    : c10::StorageImpl(use_byte_size_t(), c10::SymInt(static_cast<std::int64_t>(nbytes)),
                       c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)), /*allocator=*/nullptr,
                       /*resizable=*/false),
      role_(role),
      owner_(owner),
      index_(index),
      absent_text_(std::move(absent_text)) {
  point_away();
}

PagedStorage* PagedStorage::of(const at::Tensor& tensor) {
  if (!tensor.defined() || !tensor.has_storage()) return nullptr;
  return dynamic_cast<PagedStorage*>(tensor.storage().unsafeGetStorageImpl());
}

void PagedStorage::orphan(std::string absent_text) {
  owner_ = nullptr;
  absent_text_ = std::move(absent_text);
  point_away();
}

void PagedStorage::point_at(void* data) {
  throws_on_read(*this) = false;
  set_data_ptr_noswap(c10::DataPtr(data, c10::Device(c10::DeviceType::CPU)));
}

void PagedStorage::point_away() {
  // The pointer goes first: a raw reader then sees null or throws, never a slot that holds something else.
  set_data_ptr_noswap(c10::DataPtr(nullptr, c10::Device(c10::DeviceType::CPU)));
  release_data_and_set_meta_custom_data_ptr_error_msg_(absent_text_);
}

}  // namespace fsdp
