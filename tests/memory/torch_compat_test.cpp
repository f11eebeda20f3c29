#include "memory/torch_compat.h"

#include <thread>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/variable.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

using ::testing::HasSubstr;

c10::intrusive_ptr<c10::StorageImpl> storage_of(const at::Tensor& tensor) {
  return c10::intrusive_ptr<c10::StorageImpl>::reclaim_copy(tensor.storage().unsafeGetStorageImpl());
}

#define FSDP_TEXT_OF(key) #key
#define FSDP_TEXT(key) FSDP_TEXT_OF(key)

TEST(TouchKeyTest, IsTheOneThatWasChosenAtConfigureTime) { EXPECT_EQ(touch_key_name(), FSDP_TEXT(FSDP_DISPATCH_KEY)); }

TEST(TouchViewTest, SharesTheStorageAndCarriesTheKeyThroughItsViews) {
  const at::Tensor whole = at::arange(12, at::kFloat), like = at::zeros({2, 3}).t();
  const at::Tensor view = make_touch_view(storage_of(whole), like, DType::kFloat32, 4);
  EXPECT_TRUE(view.storage().is_alias_of(whole.storage()));
  EXPECT_EQ(view.sizes(), like.sizes());
  EXPECT_EQ(view.strides(), like.strides());
  EXPECT_EQ(view.storage_offset(), 4);
  EXPECT_TRUE(at::equal(view, whole.narrow(0, 4, 6).as_strided(like.sizes(), like.strides())));
  for (const at::Tensor& derived : {view.t(), view.view_as(view), view.select(0, 1), view.detach(), view.chunk(2)[0]}) {
    EXPECT_TRUE(carries_touch_key(derived));
  }
}

TEST(TouchViewTest, PassesTheKeyToNoResult) {
  const at::Tensor whole = at::ones({4});
  const at::Tensor view = make_touch_view(storage_of(whole), whole, DType::kFloat32, 0);
  EXPECT_FALSE(carries_touch_key(view.clone()));
  EXPECT_FALSE(carries_touch_key(view + 1));
  EXPECT_FALSE(carries_touch_key(at::zeros_like(view)));
  EXPECT_FALSE(carries_touch_key(whole));
}

TEST(PlainViewTest, BorrowsTheMemoryWithTheStridesOfItsModel) {
  float values[] = {0, 1, 2, 3, 4, 5};
  const at::Tensor view = make_plain_view(values, at::zeros({2, 3}).t(), DType::kFloat32);
  EXPECT_FALSE(carries_touch_key(view));
  EXPECT_EQ(view.sizes(), at::IntArrayRef({3, 2}));
  EXPECT_EQ(view[2][1].item<float>(), 5);
  view.fill_(9);
  EXPECT_EQ(values[3], 9);
}

TEST(DTypeTest, GoesToScalarTypesAndBack) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat64, DType::kFloat16, DType::kBFloat16, DType::kInt64,
                            DType::kInt32, DType::kInt16, DType::kInt8, DType::kUInt8, DType::kBool}) {
    EXPECT_EQ(to_dtype(to_scalar_type(dtype)), dtype);
    EXPECT_EQ(c10::elementSize(to_scalar_type(dtype)), size_of(dtype));
  }
}

TEST(DTypeTest, ThatCheckpointsCannotHoldIsRefusedByName) {
  for (const at::ScalarType type : {at::kComplexFloat, at::kQInt8}) {
    try {
      to_dtype(type);
      ADD_FAILURE() << c10::toString(type) << " was taken";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr(c10::toString(type)));
    }
  }
}

TEST(VersionTest, BumpedMakesAGraphThatSavedTheTensorThrow) {
  const at::Tensor w = at::ones({3}).requires_grad_(true), x = at::ones({3}).requires_grad_(true);
  const at::Tensor loss = (w * x).sum();
  bump_version(w);
  try {
    loss.backward();
    ADD_FAILURE() << "backward ran on a changed weight";
  } catch (const std::exception& error) {
    EXPECT_THAT(error.what(), HasSubstr("modified by an inplace operation"));
  }
}

TEST(InBackwardTest, IsTrueOnlyWhereABackwardRuns) {
  const auto run = [] {
    bool inside = false;
    const at::Tensor x = at::ones({3}).requires_grad_(true), y = x * 2;
    y.register_hook([&](const at::Tensor& gradient) {
      inside = in_backward();
      return gradient;
    });
    EXPECT_FALSE(in_backward());
    y.sum().backward();
    EXPECT_TRUE(inside);
    EXPECT_FALSE(in_backward());
  };
  run();
  std::jthread(run).join();
}

class CountingHook final : public GradientHook {
 public:
  void on_gradient(const at::Tensor& parameter) override {
    ++calls;
    sum = parameter.grad().sum().item<double>();
  }
  int calls = 0;
  double sum = 0;
};

TEST(GradientHookTest, RunsAfterEachAccumulationUntilItIsRemoved) {
  const auto hook = std::make_shared<CountingHook>();
  const at::Tensor w = at::ones({3}).requires_grad_(true);
  const void* identity = install_gradient_hook(w, hook);
  EXPECT_EQ(installed_gradient_hook(w), identity);
  (w * 2).sum().backward();
  (w * 3).sum().backward();
  EXPECT_EQ(hook->calls, 2);
  EXPECT_EQ(hook->sum, 15);  // what has accumulated by then
  remove_gradient_hook(w);
  EXPECT_EQ(installed_gradient_hook(w), nullptr);
  (w * 3).sum().backward();
  EXPECT_EQ(hook->calls, 2);
  EXPECT_EQ(hook.use_count(), 1);
}

struct ForeignHook final : torch::autograd::PostAccumulateGradHook {
  void operator()(const torch::autograd::Variable&) override {}
};

// A tensor has one slot, so a hook of the user's takes ours away; its identity tells.
TEST(GradientHookTest, ThatIsReplacedIsFoundByItsIdentity) {
  const at::Tensor w = at::ones({3}).requires_grad_(true);
  const auto hook = std::make_shared<CountingHook>();
  const void* identity = install_gradient_hook(w, hook);
  torch::autograd::impl::set_post_acc_grad_hooks(w, std::make_unique<ForeignHook>());
  EXPECT_NE(installed_gradient_hook(w), identity);
  (w * 2).sum().backward();
  EXPECT_EQ(hook->calls, 0);
  EXPECT_EQ(hook.use_count(), 1);
}

}  // namespace
}  // namespace fsdp
