#include "checkpoint/tensor_match.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

ShardView view(const std::string& name, std::vector<std::int64_t> shape = {4}, DType dtype = DType::kFloat32) {
  std::vector<std::int64_t> strides = row_major_strides(shape);
  return {name, ShardKind::kParameter, dtype, std::move(shape), std::move(strides), 0, 0, nullptr};
}

ManifestTensor tensor(const std::string& name, std::vector<std::int64_t> shape = {4}, DType dtype = DType::kFloat32) {
  return {name, dtype, std::move(shape), ShardKind::kParameter};
}

std::string mismatch(const std::vector<ShardView>& views, const std::vector<ManifestTensor>& offered) {
  try {
    match_views(views, offered, {});
  } catch (const CheckpointError& error) {
    return error.what();
  }
  return "";
}

TEST(TensorMatchTest, FindsEachTensorByKindAndName) {
  std::vector<ShardView> views = {view("b"), view("a")};
  views.push_back(view("a"));
  views.back().kind = ShardKind::kOptimizer;
  std::vector<ManifestTensor> offered = {tensor("a"), tensor("b"), tensor("a")};
  offered[0].kind = ShardKind::kOptimizer;
  EXPECT_EQ(match_views(views, offered, {}), (std::vector<std::size_t>{1, 2, 0}));
}

TEST(TensorMatchTest, NamesAllDifferencesInOneLine) {
  const std::string message = mismatch(
      {view("layers.0.weight"), view("bias", {2, 3}), view("scale", {4}, DType::kBFloat16)},
      {tensor("layer.0.weight"), tensor("bias", {3, 2}), tensor("scale")});
  EXPECT_THAT(message, HasSubstr("missing in the checkpoint: layers.0.weight (nearest: layer.0.weight)"));
  EXPECT_THAT(message, HasSubstr("not asked for by the model: layer.0.weight"));
  EXPECT_THAT(message, HasSubstr("shape: bias expected [2, 3], got [3, 2]"));
  EXPECT_THAT(message, HasSubstr("dtype: scale expected BF16, got F32"));
  EXPECT_EQ(message.find('\n'), std::string::npos);
}

TEST(TensorMatchTest, CountsWhatItDoesNotList) {
  std::vector<ManifestTensor> offered;
  for (int i = 0; i < 20; ++i) offered.push_back(tensor("extra" + std::to_string(i)));
  EXPECT_THAT(mismatch({}, offered), HasSubstr("extra7 and 12 more"));
}

TEST(TensorMatchTest, GivesNoHintWhereNothingIsNear) {
  EXPECT_THAT(mismatch({view("weight")}, {tensor("zzzzzzzz")}), testing::Not(HasSubstr("nearest")));
}

TEST(TensorMatchTest, TakesAnAliasWhereTheNameIsNotThere) {
  const Aliases aliases{.instead = {{"head", "embed"}}, .not_needed = {"copy"}};
  EXPECT_EQ(
      match_views(std::vector{view("head"), view("embed")}, std::vector{tensor("copy"), tensor("embed")}, aliases),
      (std::vector<std::size_t>{1, 1}));
}

TEST(TensorMatchTest, RefusesViewsThatCannotBeSaved) {
  std::byte data[16];
  const auto with = [&](auto change) {
    ShardView changed = view("w");
    changed.end = 4;
    changed.data = data;
    change(changed);
    return [changed] { check_views(std::vector{changed}); };
  };
  EXPECT_NO_THROW(with([](ShardView&) {})());
  EXPECT_THAT(with([](ShardView& v) { v.name = ""; }), ThrowsMessage<CheckpointError>(HasSubstr("name is empty")));
  EXPECT_THAT(with([](ShardView& v) { v.kind = ShardKind::kGradient; }),
              ThrowsMessage<CheckpointError>(HasSubstr("gradients are not saved")));
  EXPECT_THAT(with([](ShardView& v) { v.strides = {2}; }),
              ThrowsMessage<CheckpointError>(HasSubstr("view w: strides [2] of shape [4] are not dense")));
  EXPECT_THAT(with([](ShardView& v) { v.end = 5; }), ThrowsMessage<CheckpointError>(HasSubstr("range [0, 5)")));
  EXPECT_THAT(with([](ShardView& v) { v.data = nullptr; }), ThrowsMessage<CheckpointError>(HasSubstr("got null")));
  EXPECT_THAT(
      [&] {
        check_views(std::vector{view("w"), view("w")});
      },
      ThrowsMessage<CheckpointError>(HasSubstr("stands twice")));
}

}  // namespace
}  // namespace fsdp
