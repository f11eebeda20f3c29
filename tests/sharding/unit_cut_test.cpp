#include "sharding/unit_cut.h"

#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using torch::nn::Linear;

struct BlockImpl final : torch::nn::Module {
  explicit BlockImpl(std::int64_t width) {
    scale = register_parameter("scale", at::ones({width}));
    up = register_module("up", Linear(width, width));
    down = register_module("down", Linear(torch::nn::LinearOptions(width, width).bias(false)));
  }
  at::Tensor scale;
  Linear up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

// embed.weight 3x4; block0 and block1 of 4 + 16 + 4 + 16 elements each; head.weight is the embedding's; offset on
// the root.
struct ModelImpl final : torch::nn::Module {
  ModelImpl() : torch::nn::Module("Model") {
    embed = register_module("embed", Linear(torch::nn::LinearOptions(4, 3).bias(false)));
    block0 = register_module("block0", Block(4));
    block1 = register_module("block1", Block(4));
    head = register_module("head", std::make_shared<torch::nn::Module>("Head"));
    head->register_parameter("weight", embed->weight);
    offset = register_parameter("offset", at::zeros({4}));
  }
  Linear embed{nullptr};
  Block block0{nullptr}, block1{nullptr};
  std::shared_ptr<torch::nn::Module> head;
  at::Tensor offset;
};

// "name: parameters" of each unit, ties in brackets.
std::vector<std::string> cut(const Units& units) {
  std::vector<std::string> result;
  for (const CutUnit& unit : cut_units(ModelImpl(), units)) {
    std::string text = unit.name + ":";
    for (const NamedParameter& parameter : unit.parameters) {
      text += " " + parameter.name;
      for (const std::string& tied : parameter.tied_names) text += "[" + tied + "]";
    }
    result.push_back(text);
  }
  return result;
}

std::string refusal(const torch::nn::Module& module, const Units& units) {
  try {
    cut_units(module, units);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

TEST(UnitCutTest, ByTypeTakesHoldersAndImplementationsAndLeavesTheRestToTheRoot) {
  const std::vector<std::string> expected = {"(root): offset embed.weight[head.weight]",
                                             "block0: block0.scale block0.up.weight block0.up.bias block0.down.weight",
                                             "block1: block1.scale block1.up.weight block1.up.bias block1.down.weight"};
  EXPECT_THAT(cut(units<Block>()), ::testing::UnorderedElementsAreArray(expected));
  EXPECT_EQ(cut(units<BlockImpl>()), cut(units<Block>()));
}

TEST(UnitCutTest, GivesAParameterToTheInnermostUnit) {
  EXPECT_THAT(
      cut(units<Block, Linear>()),
      ::testing::UnorderedElementsAre("(root): offset", "embed: embed.weight[head.weight]", "block0: block0.scale",
                                      "block0.up: block0.up.weight block0.up.bias", "block0.down: block0.down.weight",
                                      "block1: block1.scale", "block1.up: block1.up.weight block1.up.bias",
                                      "block1.down: block1.down.weight"));
}

// Of fp32: embed 48 bytes, a block 160, its up 80 and down 64.
TEST(UnitCutTest, BySizeTakesTheLargestModulesWithinTheBound) {
  const auto names = [](std::size_t bytes) {
    std::vector<std::string> result;
    for (const CutUnit& unit : cut_units(ModelImpl(), units_by_size(bytes))) result.push_back(unit.name);
    return result;
  };
  EXPECT_THAT(names(160), ::testing::UnorderedElementsAre("(root)", "embed", "block0", "block1"));
  EXPECT_THAT(names(159), ::testing::UnorderedElementsAre("(root)", "embed", "block0.up", "block0.down", "block1.up",
                                                          "block1.down"));
  EXPECT_THAT(names(64), ::testing::UnorderedElementsAre("(root)", "embed", "block0.down", "block1.down"));
  EXPECT_THAT(names(1), ElementsAre("(root)"));
}

TEST(UnitCutTest, ByNameTakesExactlyThese) {
  EXPECT_THAT(
      cut(units_named({"block1.up", "head"})),
      ::testing::UnorderedElementsAre(
          "(root): offset embed.weight[head.weight] block0.scale block0.up.weight block0.up.bias block0.down.weight "
          "block1.scale block1.down.weight",
          "block1.up: block1.up.weight block1.up.bias"));
}

TEST(UnitCutTest, ByPredicateSeesDottedNames) {
  std::vector<std::string> seen;
  const auto units = cut_units(ModelImpl(), units_if([&](const std::string& name, const torch::nn::Module&) {
                                 seen.push_back(name);
                                 return name == "block0.down";
                               }));
  EXPECT_EQ(units.size(), 2U);
  EXPECT_THAT(seen,
              ElementsAre("embed", "block0", "block0.up", "block0.down", "block1", "block1.up", "block1.down", "head"));
}

TEST(UnitCutTest, NamesASharedModuleOnce) {
  torch::nn::Module model("Model");
  const auto shared = model.register_module("first", Linear(2, 2).ptr());
  model.register_module("second", shared);
  const auto units = cut_units(model, fsdp::units<Linear>());
  ASSERT_EQ(units.size(), 1U);
  ASSERT_EQ(units[0].parameters.size(), 2U);
  EXPECT_EQ(units[0].name, "first");
  EXPECT_EQ(units[0].parameters[0].name, "first.weight");
  EXPECT_THAT(units[0].parameters[0].tied_names, ElementsAre("second.weight"));
}

TEST(UnitCutTest, RefusesWhatMatchesNothing) {
  const ModelImpl model;
  EXPECT_THAT(refusal(model, units_if([](const std::string&, const torch::nn::Module&) { return false; })),
              AllOf(HasSubstr("match no sub-module of Model"), HasSubstr("BlockImpl")));
  EXPECT_THAT(refusal(model, units_named({"block0", "block9"})),
              AllOf(HasSubstr("unit block9"), HasSubstr("block1.down")));
  EXPECT_THAT(refusal(torch::nn::Module("Empty"), {}), AllOf(HasSubstr("Empty"), HasSubstr("no parameter")));
}

TEST(UnitsTest, RefuseEmptyDescriptions) {
  EXPECT_THROW(units_by_size(0), InvalidArgument);
  EXPECT_THROW(units_named({}), InvalidArgument);
  EXPECT_THROW(units_if({}), InvalidArgument);
}

}  // namespace
}  // namespace fsdp
