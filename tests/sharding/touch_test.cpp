#include "sharding/touch.h"

#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

#include "memory/torch_compat.h"
#include "memory/torch_storage.h"

namespace fsdp {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Pages eight floats in and out, and writes down what it was asked.
class RecordingOwner final : public StorageOwner {
 public:
  explicit RecordingOwner(std::string name) : name_(std::move(name)) {}
  RecordingOwner(const RecordingOwner&) = delete;
  ~RecordingOwner() override {
    for (const auto& storage : storages_) storage->orphan("gone");
  }

  // A parameter of eight elements, each with its index for a value.
  at::Tensor add(PagedStorage::Role role = PagedStorage::Role::kParameters) {
    const int index = static_cast<int>(storages_.size());
    storages_.push_back(
        c10::make_intrusive<PagedStorage>(8 * sizeof(float), role, this, index, "absent " + parameter_name_of(index)));
    values_.push_back(std::make_unique<float[]>(8));
    for (int i = 0; i < 8; ++i) values_.back()[static_cast<std::size_t>(i)] = static_cast<float>(i);
    pins_.push_back(0);
    return make_touch_view(storages_.back(), at::empty({2, 4}), DType::kFloat32, 0);
  }

  void acquire(const OperatorUse& use) override {
    if (refuses) throw std::runtime_error("no memory for " + name_);
    log.push_back("acquire " + describe(use));
    for (PagedStorage* storage : use.storages) {
      ++pins_[static_cast<std::size_t>(storage->index())];
      storage->point_at(values_[static_cast<std::size_t>(storage->index())].get());
    }
  }
  void release(const OperatorUse& use, bool completed) override {
    log.push_back((completed ? "release " : "give up ") + describe(use));
    for (PagedStorage* storage : use.storages) {
      if (--pins_[static_cast<std::size_t>(storage->index())] == 0) storage->point_away();
    }
  }
  void accumulate_gradient(PagedStorage&, const at::Tensor& added) override {
    log.push_back("accumulate " + std::to_string(added.sum().item<int>()));
  }
  void clear_gradient(PagedStorage&) override { log.push_back("clear"); }
  std::string parameter_name(const PagedStorage& storage, const at::Tensor& tensor) const override {
    return fmt::format("{}+{}", parameter_name_of(storage.index()), tensor.defined() ? tensor.storage_offset() : 0);
  }

  float value(std::size_t storage, std::size_t element) const { return values_[storage][element]; }

  std::vector<std::string> log;
  bool refuses = false;

 private:
  std::string parameter_name_of(int index) const { return name_ + std::to_string(index); }
  std::string describe(const OperatorUse& use) const {
    std::string text(use.name);
    for (const PagedStorage* storage : use.storages) text.append(" ").append(parameter_name_of(storage->index()));
    return use.writes ? text.append(" to write") : text;
  }

  std::string name_;
  std::vector<c10::intrusive_ptr<PagedStorage>> storages_;
  std::vector<std::unique_ptr<float[]>> values_;
  std::vector<int> pins_;
};

template <class Body>
std::string error_text(const Body& body) {
  try {
    body();
  } catch (const std::exception& error) {
    return error.what();
  }
  return {};
}

struct TreatmentCase {
  const char *name, *overload;
  TouchTreatment treatment;
};
void PrintTo(const TreatmentCase& c, std::ostream* out) { *out << c.name << "." << c.overload; }

class TouchTreatmentTest : public ::testing::TestWithParam<TreatmentCase> {};

TEST_P(TouchTreatmentTest, FollowsFromTheSchema) {
  EXPECT_EQ(touch_treatment(GetParam().name, GetParam().overload), GetParam().treatment);
}

INSTANTIATE_TEST_SUITE_P(Operators, TouchTreatmentTest,
                         ::testing::Values(TreatmentCase{"aten::view", "", TouchTreatment::kPass},
                                           TreatmentCase{"aten::t", "", TouchTreatment::kPass},
                                           TreatmentCase{"aten::split", "Tensor", TouchTreatment::kPass},
                                           TreatmentCase{"aten::chunk", "", TouchTreatment::kPass},
                                           TreatmentCase{"aten::unbind", "int", TouchTreatment::kPass},
                                           TreatmentCase{"aten::detach", "", TouchTreatment::kPass},
                                           TreatmentCase{"aten::to", "dtype", TouchTreatment::kPass},
                                           TreatmentCase{"aten::contiguous", "", TouchTreatment::kPass},
                                           TreatmentCase{"aten::zeros_like", "", TouchTreatment::kPass},
                                           TreatmentCase{"aten::is_same_size", "", TouchTreatment::kPass},
                                           TreatmentCase{"aten::addmm", "", TouchTreatment::kUse},
                                           TreatmentCase{"aten::linear", "", TouchTreatment::kUse},
                                           TreatmentCase{"aten::quantile", "scalar", TouchTreatment::kUse},
                                           TreatmentCase{"aten::clone", "", TouchTreatment::kUse},
                                           TreatmentCase{"aten::fill_", "Scalar", TouchTreatment::kUse},
                                           TreatmentCase{"aten::copy_", "", TouchTreatment::kUse},
                                           TreatmentCase{"aten::mm", "out", TouchTreatment::kUse},
                                           TreatmentCase{"aten::embedding_renorm_", "", TouchTreatment::kUse},
                                           TreatmentCase{"aten::_foreach_add_", "List", TouchTreatment::kUse},
                                           TreatmentCase{"aten::set_", "source_Tensor", TouchTreatment::kRefuse},
                                           TreatmentCase{"aten::resize_", "", TouchTreatment::kRefuse},
                                           TreatmentCase{"aten::t_", "", TouchTreatment::kRefuse},
                                           TreatmentCase{"aten::squeeze_", "", TouchTreatment::kRefuse}));

TEST(TouchTreatmentTableTest, RefusesAnOperatorThatIsNone) {
  EXPECT_THROW(touch_treatment("aten::no_such_operator", ""), InvalidArgument);
}

TEST(TouchTest, LeavesViewsAndMetadataUnpaged) {
  RecordingOwner owner("w");
  const at::Tensor w = owner.add();
  EXPECT_EQ(w.t().narrow(0, 1, 2).reshape({4}).sizes(), at::IntArrayRef({4}));  // reshape of a transposed view copies
  owner.log.clear();
  (void)w.view({8}).chunk(2)[1].expand({3, 4}).detach();
  EXPECT_EQ(at::zeros_like(w).sum().item<int>(), 0);
  EXPECT_TRUE(w.is_same_size(w));
  EXPECT_THAT(owner.log, IsEmpty());
}

TEST(TouchTest, PagesInForOneOperatorAndOutAfterIt) {
  RecordingOwner owner("w");
  const at::Tensor w = owner.add();
  EXPECT_EQ(w.sum().item<int>(), 28);
  EXPECT_THAT(owner.log, ElementsAre("acquire aten::sum w0", "release aten::sum w0"));
  EXPECT_THAT(error_text([&] { w.data_ptr<float>(); }), HasSubstr("absent w0"));
}

TEST(TouchTest, ReachesThroughViews) {
  RecordingOwner owner("w");
  const at::Tensor w = owner.add();
  EXPECT_EQ(w.t()[1].sum().item<int>(), 1 + 5);
}

// quantile is a composite that sorts, indexes and reads: only it owns a use, and nothing leaves while it runs.
TEST(TouchTest, GivesTheUseToTheOutermostOperator) {
  RecordingOwner owner("w");
  const at::Tensor w = owner.add();
  EXPECT_EQ(at::quantile(w, 0.5).item<float>(), 3.5F);
  EXPECT_THAT(owner.log, ElementsAre("acquire aten::quantile w0", "release aten::quantile w0"));
}

TEST(TouchTest, NamesEachStorageOnceInTheOrderOfTheArguments) {
  RecordingOwner owner("w");
  const at::Tensor first = owner.add(), second = owner.add();
  (void)at::cat({second, first.narrow(0, 0, 1), first, second});
  EXPECT_THAT(owner.log, ElementsAre("acquire aten::cat w1 w0", "release aten::cat w1 w0"));
}

TEST(TouchTest, SeesListsAndOptionalLists) {
  RecordingOwner owner("w");
  const at::Tensor w = owner.add();
  const at::Tensor index = w[0].to(at::kLong);  // a copy of 0 1 2 3
  owner.log.clear();
  (void)at::ones({4}).index({w[0] > 1});
  EXPECT_THAT(owner.log, ElementsAre("acquire aten::gt w0", "release aten::gt w0"));
  owner.log.clear();
  (void)at::_foreach_norm({w, at::ones({2})});
  EXPECT_THAT(owner.log, ElementsAre("acquire aten::_foreach_norm w0", "release aten::_foreach_norm w0"));
  owner.log.clear();
  c10::List<std::optional<at::Tensor>> indices;
  indices.push_back(std::nullopt);
  indices.push_back(index);
  (void)at::index(w, indices);
  EXPECT_THAT(owner.log, ElementsAre("acquire aten::index w0", "release aten::index w0"));
}

TEST(TouchTest, TellsWritesFromReads) {
  RecordingOwner owner("w");
  const at::Tensor w = owner.add(), other = owner.add();
  const auto last = [&] { return owner.log.at(owner.log.size() - 2); };
  w.fill_(3);
  EXPECT_EQ(last(), "acquire aten::fill_ w0 to write");
  EXPECT_EQ(owner.value(0, 5), 3);
  w[1].mul_(2);
  EXPECT_EQ(last(), "acquire aten::mul_ w0 to write");
  EXPECT_EQ(owner.value(0, 5), 6);
  EXPECT_EQ(owner.value(0, 3), 3);
  at::Tensor out = other.detach();
  at::add_out(out, w, w);
  EXPECT_EQ(last(), "acquire aten::add w0 w1 to write");
  at::_foreach_mul_({w, other}, 2.0);
  EXPECT_EQ(last(), "acquire aten::_foreach_mul_ w0 w1 to write");
  at::empty({2, 4}).copy_(w);
  EXPECT_EQ(last(), "acquire aten::copy_ w0");
}

TEST(TouchTest, PagesInForBackwardAsWell) {
  RecordingOwner owner("w");
  const at::Tensor w = owner.add();
  const at::Tensor x = at::ones({3, 2}).requires_grad_(true);
  const at::Tensor y = x.mm(w);
  owner.log.clear();
  y.sum().backward();
  EXPECT_THAT(owner.log, ::testing::Not(IsEmpty()));
  EXPECT_EQ(x.grad()[0][1].item<int>(), 4 + 5 + 6 + 7);
}

TEST(TouchTest, GivesUpWhatAFailedOperatorHeld) {
  RecordingOwner owner("w");
  const at::Tensor w = owner.add();
  EXPECT_THAT(error_text([&] { w.mm(at::ones({7, 7})); }), HasSubstr("mat1 and mat2"));
  EXPECT_THAT(owner.log, ElementsAre("acquire aten::mm w0", "give up aten::mm w0"));
  EXPECT_EQ(w.sum().item<int>(), 28);
}

TEST(TouchTest, AsksEachOwnerForItsOwnAndGivesAllBackWhenOneRefuses) {
  RecordingOwner owners[] = {RecordingOwner("a"), RecordingOwner("b")};
  const at::Tensor a = owners[0].add(), b = owners[1].add();
  EXPECT_EQ((a + b).sum().item<int>(), 56);
  EXPECT_THAT(owners[0].log, ElementsAre("acquire aten::add a0", "release aten::add a0"));
  EXPECT_THAT(owners[1].log, ElementsAre("acquire aten::add b0", "release aten::add b0"));
  for (RecordingOwner& owner : owners) owner.log.clear();
  owners[1].refuses = true;  // the later one in memory, so it is asked second
  EXPECT_EQ(error_text([&] { (void)(b + a); }), "no memory for b");
  EXPECT_THAT(owners[0].log, ElementsAre("acquire aten::add a0", "give up aten::add a0"));
  EXPECT_THAT(owners[1].log, IsEmpty());
}

TEST(TouchTest, RefusesAnotherStorageOrShapeByName) {
  RecordingOwner owner("w");
  const at::Tensor w = owner.add();
  EXPECT_THAT(error_text([&] {
                w.set_(at::ones({2, 4}));
              }),
              AllOf(HasSubstr("aten::set_"), HasSubstr("w0+0"), HasSubstr("refused")));
  EXPECT_THAT(error_text([&] { w[1].resize_({100}); }), AllOf(HasSubstr("aten::resize_"), HasSubstr("w0+4")));
  EXPECT_THAT(error_text([&] { w.t_(); }), HasSubstr("aten::t_"));
  EXPECT_EQ(w.sizes(), at::IntArrayRef({2, 4}));
  EXPECT_THAT(owner.log, IsEmpty());
}

TEST(TouchTest, OfAClosedEngineSaysSo) {
  at::Tensor w;
  {
    RecordingOwner owner("w");
    w = owner.add();
  }
  EXPECT_THAT(error_text([&] { w.sum(); }), HasSubstr("aten::sum: gone"));
}

TEST(GradientPlaceholderTest, TakesWhatAutogradAddsToIt) {
  RecordingOwner owner("w");
  const at::Tensor w = at::ones({2, 4}).requires_grad_(true);
  w.mutable_grad() = owner.add(PagedStorage::Role::kGradient);
  (w * 3).sum().backward();
  EXPECT_THAT(owner.log, ElementsAre("accumulate 24"));
}

TEST(GradientPlaceholderTest, IsClearedByZeroGrad) {
  RecordingOwner owner("w");
  const at::Tensor gradient = owner.add(PagedStorage::Role::kGradient);
  gradient.zero_();
  EXPECT_THAT(owner.log, ElementsAre("clear"));
}

TEST(GradientPlaceholderTest, RefusesEveryOtherUseByName) {
  RecordingOwner owner("w");
  const at::Tensor gradient = owner.add(PagedStorage::Role::kGradient), ones = at::ones({2, 4});
  const auto refused = HasSubstr(": absent w0");
  EXPECT_THAT(error_text([&] { gradient.sum(); }), refused);
  EXPECT_THAT(error_text([&] { gradient.mul_(2); }), refused);
  EXPECT_THAT(error_text([&] { gradient.add_(ones); }), refused) << "outside of backward";
  EXPECT_THAT(error_text([&] { ones.clone().add_(gradient); }), refused);
  EXPECT_THAT(error_text([&] { (void)at::cat({ones, gradient}); }), refused);
  EXPECT_THAT(owner.log, IsEmpty());
}

}  // namespace
}  // namespace fsdp
