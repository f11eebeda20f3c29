#include "sharding/sharded_model.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/linear.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

namespace fsdp {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// Nothing here runs an operator on a sharded parameter's data.
class NoOwner final : public StorageOwner {
 public:
  void acquire(const OperatorUse&) override { throw std::logic_error("nothing is to be gathered"); }
  void release(const OperatorUse&, bool) override {}
  void accumulate_gradient(PagedStorage&, const at::Tensor&) override {}
  void clear_gradient(PagedStorage&) override {}
  std::string parameter_name(const PagedStorage&, const at::Tensor&) const override { return {}; }
};

class NoHook final : public GradientHook {
 public:
  void on_gradient(const at::Tensor&) override {}
};

// Unit "layer": weight 3x5 and bias 3, trained fp32; "frozen" 4 fp32; "wide" 2 fp64; root: an empty one and a scalar.
struct Model final : torch::nn::Module {
  Model() : torch::nn::Module("Model") {
    layer = register_module("layer", torch::nn::Linear(5, 3));
    frozen = layer->register_parameter("frozen", at::arange(4, at::kFloat), /*requires_grad=*/false);
    wide = layer->register_parameter("wide", at::ones({2}, at::kDouble));
    empty = register_parameter("empty", at::zeros({0, 3}));
    scalar = register_parameter("scalar", at::full({}, 2.0));
  }
  torch::nn::Linear layer{nullptr};
  at::Tensor frozen, wide, empty, scalar;
};

// The sharded model of each rank, in turn.
void with_sharded(int world_size, const std::function<void(Model&, ShardedModel&, const Context&)>& body,
                  UnitPolicy policy = {}) {
  run_ranks(world_size, [&](const Context& context) {
    NoOwner owner;
    Model model;
    if (policy.strategy != Strategy::kReplicate) policy.shares = context.world_size();
    std::vector<CutUnit> cut = cut_units(model, units<torch::nn::Linear>());
    const std::vector<UnitPolicy> policies(cut.size(), policy);
    ShardedModel sharded(std::move(cut), policies, context.world_size(), context.rank(), &owner);
    body(model, sharded, context);
    sharded.release();
  });
}

const ShardedParameter& parameter(const ShardedModel& sharded, const std::string& name) {
  for (const ShardedParameter& p : sharded.parameters) {
    if (p.name == name) return p;
  }
  throw std::out_of_range(name);
}

std::string identity_error(const ShardedModel& sharded) {
  try {
    sharded.check_identity();
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return {};
}

TEST(ShardedModelTest, GroupsByTypeAndRequiresGrad) {
  for (const int world_size : {1, 2, 3, 4}) {
    with_sharded(world_size, [](Model&, const ShardedModel& sharded, const Context&) {
      ASSERT_EQ(sharded.units.size(), 2U);
      ASSERT_EQ(sharded.groups.size(), 4U);
      EXPECT_EQ(parameter(sharded, "layer.weight").group, parameter(sharded, "layer.bias").group);
      EXPECT_NE(parameter(sharded, "layer.weight").group, parameter(sharded, "layer.frozen").group);
      EXPECT_NE(parameter(sharded, "layer.weight").group, parameter(sharded, "layer.wide").group);
      EXPECT_EQ(parameter(sharded, "empty").group, parameter(sharded, "scalar").group);
      EXPECT_EQ(parameter(sharded, "layer.frozen").trainable_index, -1);
      EXPECT_FALSE(parameter(sharded, "layer.frozen").gradient_storage);
    });
  }
}

// A unit's groups follow each other in its slot; all groups follow each other in a rank's shards.
TEST(ShardedModelTest, LaysGroupsOutSideBySideInSlotShardAndState) {
  for (const int world_size : {1, 2, 3, 4}) {
    with_sharded(world_size, [&](Model&, const ShardedModel& sharded, const Context& context) {
      std::size_t shard = 0, state = 0;
      for (const UnitLayout& unit : sharded.units) {
        std::size_t slot = 0;
        for (const int index : unit.groups) {
          const FlatGroup& group = sharded.groups[static_cast<std::size_t>(index)];
          EXPECT_EQ(group.slot_offset, slot);
          EXPECT_EQ(group.parameter_offset, shard);
          EXPECT_EQ(group.parameter_stride, 0U);
          EXPECT_EQ(group.flat_bytes(), group.shard_bytes() * static_cast<std::size_t>(world_size));
          slot += group.flat_bytes();
          shard += group.shard_bytes();
          if (!group.trainable) continue;
          EXPECT_EQ(group.state_offset, state);
          state += group.shard_bytes();  // fp32 and fp64 keep their type
        }
        EXPECT_EQ(unit.bytes, slot);
        EXPECT_LE(unit.bytes, sharded.slot_bytes);
      }
      EXPECT_EQ(sharded.parameter_bytes, shard);
      EXPECT_EQ(sharded.master_bytes, 0U);
      EXPECT_EQ(sharded.gradient_bytes, state);
      EXPECT_EQ(sharded.state_bytes, state);
      for (const ShardedParameter& p : sharded.parameters) {
        EXPECT_EQ(p.piece,
                  sharded.groups[static_cast<std::size_t>(p.group)].layout->piece(p.index_in_group, context.rank()))
            << p.name;
      }
    });
  }
}

// NOTE [Strategies]: what is kept lies whole in its segment, every share in its place.
TEST(ShardedModelTest, LaysOutWholeWhatAStrategyKeeps) {
  for (const int world_size : {1, 2, 3, 4}) {
    with_sharded(world_size,
                 [&](Model&, const ShardedModel& sharded, const Context&) {
                   std::size_t parameters = 0, gradients = 0, state = 0;
                   for (const FlatGroup& group : sharded.groups) {
                     EXPECT_EQ(group.parameter_offset, parameters);
                     EXPECT_EQ(group.parameter_offset, sharded.unit_of(group).parameter_offset + group.slot_offset);
                     EXPECT_EQ(group.parameter_stride, group.shard_bytes());
                     parameters += group.flat_bytes();
                     if (!group.trainable) continue;
                     EXPECT_EQ(group.gradient_offset, gradients);
                     EXPECT_EQ(group.local_offset, gradients);
                     EXPECT_EQ(group.gradient_stride, group.shard_bytes());
                     gradients += group.flat_bytes();
                     state += group.shard_bytes();
                   }
                   EXPECT_EQ(sharded.parameter_bytes, parameters);
                   EXPECT_EQ(sharded.gradient_bytes, gradients);
                   EXPECT_EQ(sharded.state_bytes, state);
                   EXPECT_EQ(sharded.slot_bytes, 0U);
                   EXPECT_EQ(sharded.local_bytes, 0U);
                 },
                 {.strategy = Strategy::kShardOptimizer, .keeps_parameters = true, .keeps_gradients = true});
  }
}

TEST(ShardedModelTest, KeepsMastersOfWhatIsComputedInFewerBits) {
  with_sharded(2,
               [](const Model& model, ShardedModel& sharded, const Context&) {
                 sharded.take_over(std::make_shared<NoHook>());
                 EXPECT_EQ(model.layer->weight.scalar_type(), at::kBFloat16);
                 EXPECT_EQ(model.frozen.scalar_type(), at::kBFloat16);
                 EXPECT_EQ(model.wide.scalar_type(), at::kDouble);
                 std::size_t masters = 0, state = 0;
                 for (const FlatGroup& group : sharded.groups) {
                   const std::int64_t numel = group.layout->shard_numel();
                   EXPECT_EQ(group.has_master(), group.master_dtype == DType::kFloat32);
                   if (group.has_master()) masters += bytes_of(numel, DType::kFloat32);
                   if (group.trainable) state += bytes_of(numel, group.gradient_dtype());
                 }
                 EXPECT_EQ(sharded.master_bytes, masters);
                 EXPECT_EQ(sharded.state_bytes, state);
               },
               {.param = DType::kBFloat16});
}

TEST(ShardedModelTest, TakesTensorsOverWithoutChangingWhatTheyAre) {
  with_sharded(2, [](const Model& model, ShardedModel& sharded, const Context&) {
    const void* identity = model.layer->weight.unsafeGetTensorImpl();
    sharded.take_over(std::make_shared<NoHook>());
    const at::Tensor& weight = model.layer->weight;
    EXPECT_EQ(weight.unsafeGetTensorImpl(), identity);
    EXPECT_TRUE(carries_touch_key(weight) && weight.requires_grad() && weight.is_leaf());
    EXPECT_EQ(weight.sizes(), at::IntArrayRef({3, 5}));
    EXPECT_TRUE(carries_touch_key(model.frozen));
    EXPECT_EQ(model.frozen.sizes(), at::IntArrayRef({4}));
    EXPECT_EQ(PagedStorage::of(weight), PagedStorage::of(model.layer->bias));
    EXPECT_EQ(&sharded.parameter_of(weight), &parameter(sharded, "layer.weight"));
    EXPECT_EQ(identity_error(sharded), "");
  });
}

TEST(ShardedModelTest, NamesAParameterThroughItsViews) {
  with_sharded(1, [](const Model& model, ShardedModel& sharded, const Context&) {
    sharded.take_over(std::make_shared<NoHook>());
    for (const auto& item : model.named_parameters()) {
      const at::Tensor& tensor = item.value();
      EXPECT_EQ(sharded.parameter_name(*PagedStorage::of(tensor), tensor), item.key());
      if (tensor.dim() == 0 || tensor.size(0) < 2) continue;
      EXPECT_EQ(sharded.parameter_name(*PagedStorage::of(tensor), tensor.detach()[1]), item.key());
    }
    const ShardedParameter& bias = parameter(sharded, "layer.bias");
    EXPECT_EQ(sharded.parameter_name(*bias.gradient_storage, at::Tensor()), "layer.bias");
  });
}

TEST(ShardedModelTest, FindsWhatWasChangedBehindItsBack) {
  struct Change {
    const char* found;
    std::function<void(Model&)> change;
  };
  const Change changes[] = {
      {"layer.bias of unit layer was given other storage",
       [](Model& m) { m.layer->bias.unsafeGetTensorImpl()->set_storage_keep_dtype(at::ones({3}).storage()); }},
      {"layer.bias of unit layer had its gradient hook replaced",
       [](Model& m) { remove_gradient_hook(m.layer->bias); }},
      {"layer.frozen of unit layer was set to require grad", [](Model& m) { m.frozen.requires_grad_(true); }},
      {"layer.bias of unit layer", [](Model& m) { m.layer->bias.unsafeGetTensorImpl()->set_storage_offset(0); }},
      {"layer.weight of unit layer",
       [](Model& m) {
         m.layer->weight.unsafeGetTensorImpl()->set_sizes_contiguous({5, 3});
       }},
  };
  for (const Change& change : changes) {
    with_sharded(2, [&](Model& model, ShardedModel& sharded, const Context&) {
      sharded.take_over(std::make_shared<NoHook>());
      change.change(model);
      EXPECT_THAT(identity_error(sharded), AllOf(HasSubstr(change.found), HasSubstr("after fsdp::shard")));
    });
  }
}

TEST(ShardedModelTest, ReleasedMakesParametersThrowAndTakesItsHooksAway) {
  with_sharded(2, [](const Model& model, ShardedModel& sharded, const Context&) {
    sharded.take_over(std::make_shared<NoHook>());
    sharded.release();
    EXPECT_EQ(installed_gradient_hook(model.layer->weight), nullptr);
    try {
      model.layer->weight.data_ptr<float>();
      ADD_FAILURE() << "a parameter of a closed engine was read";
    } catch (const std::exception& error) {
      EXPECT_THAT(error.what(), HasSubstr("keep the fsdp::Engine"));
    }
  });
}

TEST(ShardedModelTest, RefusesATrainedParameterOfAnIntegerType) {
  run_ranks(2, [](const Context& context) {
    NoOwner owner;
    std::vector<CutUnit> units(1);
    units[0].name = "layer";
    units[0].parameters.push_back({"layer.mask", {}, at::ones({2}, at::kComplexFloat)});
    try {
      const ShardedModel sharded(std::move(units), {UnitPolicy{}}, context.world_size(), context.rank(), &owner);
      ADD_FAILURE() << "a complex parameter was taken";
    } catch (const InvalidArgument& error) {
      EXPECT_THAT(error.what(), HasSubstr("ComplexFloat"));
    }
  });
}

}  // namespace
}  // namespace fsdp
