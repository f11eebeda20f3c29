#include "memory/torch_storage.h"

#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "memory/torch_compat.h"

namespace fsdp {
namespace {

using ::testing::HasSubstr;

constexpr const char* kAbsent = "unit blocks.1 is not resident";

c10::intrusive_ptr<PagedStorage> storage_of(std::size_t bytes, StorageOwner* owner = nullptr) {
  return c10::make_intrusive<PagedStorage>(bytes, PagedStorage::Role::kParameters, owner, 7, kAbsent);
}

// A plain view, so that nothing but the storage is under test.
at::Tensor view_of(const c10::intrusive_ptr<PagedStorage>& storage, at::IntArrayRef sizes) {
  auto impl = c10::make_intrusive<c10::TensorImpl>(c10::Storage(storage), c10::DispatchKeySet(c10::DispatchKey::CPU),
                                                   caffe2::TypeMeta::Make<float>());
  impl->set_sizes_contiguous(sizes);
  return at::Tensor(std::move(impl));
}

std::string error_of_raw_read(const at::Tensor& tensor) {
  try {
    tensor.data_ptr<float>();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

TEST(PagedStorageTest, IsAbsentAtFirstAndThrowsItsTextToRawReaders) {
  const at::Tensor tensor = view_of(storage_of(24), {6});
  EXPECT_THAT(error_of_raw_read(tensor), HasSubstr(kAbsent));
}

TEST(PagedStorageTest, KeepsItsSizeWhileAbsentSoThatViewsCanBeMade) {
  const auto storage = storage_of(24);
  const at::Tensor tensor = view_of(storage, {2, 3});
  EXPECT_EQ(storage->nbytes(), 24U);
  EXPECT_EQ(tensor.t().sizes(), at::IntArrayRef({3, 2}));
  EXPECT_EQ(tensor.narrow(1, 1, 2).storage_offset(), 1);
  EXPECT_EQ(tensor.as_strided({2}, {2}).numel(), 2);
  EXPECT_EQ(tensor.expand({4, 2, 3}).numel(), 24);
}

TEST(PagedStorageTest, ServesViewsMadeBeforeItCame) {
  const auto storage = storage_of(24);
  const at::Tensor tensor = view_of(storage, {6});
  const at::Tensor view = tensor.narrow(0, 2, 2);
  std::vector<float> here{0, 1, 2, 3, 4, 5}, there{10, 11, 12, 13, 14, 15};
  storage->point_at(here.data());
  EXPECT_EQ(view.sum().item<float>(), 5);
  storage->point_away();
  EXPECT_THAT(error_of_raw_read(view), HasSubstr(kAbsent));
  storage->point_at(there.data());
  EXPECT_EQ(view.sum().item<float>(), 25);
  EXPECT_EQ(tensor.data_ptr<float>(), there.data());
}

TEST(PagedStorageTest, WithoutElementsIsReadableWhenPointedAt) {
  const auto storage = storage_of(0);
  const at::Tensor tensor = view_of(storage, {0});
  float nothing = 0;
  storage->point_at(&nothing);
  EXPECT_EQ(tensor.sum().item<float>(), 0);
}

TEST(PagedStorageTest, OrphanedKeepsThrowingTheNewText) {
  const auto storage = storage_of(24);
  const at::Tensor tensor = view_of(storage, {6});
  std::vector<float> values(6);
  storage->point_at(values.data());
  storage->orphan("the engine is gone");
  EXPECT_EQ(storage->owner(), nullptr);
  EXPECT_THAT(error_of_raw_read(tensor), HasSubstr("the engine is gone"));
}

TEST(PagedStorageTest, IsFoundThroughItsTensorsAndNoOthers) {
  const auto storage = storage_of(24);
  EXPECT_EQ(PagedStorage::of(view_of(storage, {6}).narrow(0, 1, 2)), storage.get());
  EXPECT_EQ(PagedStorage::of(at::ones({6})), nullptr);
  EXPECT_EQ(PagedStorage::of(at::Tensor()), nullptr);
  EXPECT_EQ(PagedStorage::of(at::ones({2, 2}).to_sparse()), nullptr);
  EXPECT_EQ(storage->index(), 7);
  EXPECT_EQ(storage->role(), PagedStorage::Role::kParameters);
}

}  // namespace
}  // namespace fsdp
