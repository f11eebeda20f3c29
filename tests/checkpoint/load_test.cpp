#include "checkpoint/load.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

#include "checkpoint/manifest.h"
#include "tests/checkpoint/faulty_file_system.h"
#include "tests/checkpoint/model_shard.h"
#include "tests/support/temp_dir.h"

namespace fsdp {
namespace {

using testing::AllOf;
using testing::HasSubstr;

void save(int world_size, const std::filesystem::path& dir, std::int64_t step,
          const std::vector<ModelTensor>& model = test_model()) {
  run_ranks(world_size, [&](Context context) {
    ModelShard shard(model, context.rank(), world_size);
    shard.fill();
    CheckpointContent content = shard.content(step);
    content.rank_state = {{"rng", {std::byte{9}, std::byte(context.rank())}}, {"sampler", {}}};
    save_checkpoint(context.communicator(), dir, content);
  });
}

// The message on every rank of a load that must fail; whether the views were left alone goes to `untouched`.
std::string failed_load(int world_size, const std::filesystem::path& dir, const std::vector<ModelTensor>& model,
                        bool* untouched = nullptr) {
  std::vector<std::string> messages(static_cast<std::size_t>(world_size), "loaded");
  std::vector<char> clear(static_cast<std::size_t>(world_size), 0);
  run_ranks(world_size, [&](Context context) {
    ModelShard shard(model, context.rank(), world_size);
    const auto rank = static_cast<std::size_t>(context.rank());
    try {
      load_checkpoint(context.communicator(), dir, shard.views());
    } catch (const CheckpointError& error) {
      messages[rank] = error.what();
    }
    clear[rank] = shard.is_clear();
  });
  for (const std::string& message : messages) EXPECT_EQ(message, messages.front());
  if (untouched) *untouched = std::ranges::all_of(clear, [](char c) { return c != 0; });
  return messages.front();
}

TEST(LoadTest, IsBitEqualForAllPairsOfWorldSizes) {
  for (int saved = 1; saved <= 4; ++saved) {
    const TempDir dir;
    save(saved, dir.path(), 17);
    for (int world_size = 1; world_size <= 4; ++world_size) {
      run_ranks(world_size, [&](Context context) {
        ModelShard shard(context.rank(), world_size);
        const auto loaded = load_checkpoint(context.communicator(), dir.path(), shard.views());
        ASSERT_TRUE(loaded);
        EXPECT_TRUE(shard.is_filled()) << saved << " -> " << world_size << " rank " << context.rank();
        EXPECT_EQ(loaded->step, 17);
        EXPECT_EQ(loaded->path, dir / "step-000017");
        EXPECT_EQ(loaded->saved_world_size, saved);
        EXPECT_EQ(loaded->scalars,
                  (std::map<std::string, std::int64_t>{{"offset", -3}, {"optimizer_step.embed.weight", 17}}));
        std::map<std::string, std::vector<std::byte>> state;
        if (saved == world_size) state = {{"rng", {std::byte{9}, std::byte(context.rank())}}, {"sampler", {}}};
        EXPECT_EQ(loaded->rank_state, state);
      });
    }
  }
}

TEST(LoadTest, LoadsIntoOtherMemoryFormatsOfTheSameTensors) {
  const TempDir dir;
  save(3, dir.path(), 1);
  auto model = test_model();
  for (ModelTensor& tensor : model) {
    if (tensor.shape.size() == 4) tensor.strides = {24, 6, 3, 1};
    if (tensor.name.ends_with("embed.weight")) tensor.strides = {1, 11};
    if (tensor.name.ends_with("proj.weight")) tensor.strides = {3, 1};
  }
  run_ranks(2, [&](Context context) {
    ModelShard shard(model, context.rank(), 2);
    ASSERT_TRUE(load_checkpoint(context.communicator(), dir.path(), shard.views()));
    EXPECT_TRUE(shard.is_filled());
  });
}

TEST(LoadTest, FindsNothingWhereNothingIsCommitted) {
  const TempDir dir;
  std::filesystem::create_directories(dir / "step-000004.tmp-0123456789abcdef");
  write_file(dir / "step-000004.tmp-0123456789abcdef/manifest.json", "{}");
  std::filesystem::create_directory(dir / "step-000003");
  run_ranks(3, [&](Context context) {
    ModelShard shard(context.rank(), 3);
    EXPECT_FALSE(load_checkpoint(context.communicator(), dir / "missing", shard.views()));
    EXPECT_FALSE(load_checkpoint(context.communicator(), dir.path(), shard.views()));
  });
}

TEST(LoadTest, TakesTheNewestStepThatHasAManifest) {
  const TempDir dir;
  for (const std::int64_t step : {2, 30, 4}) save(2, dir.path(), step);
  save(2, dir.path(), 40);
  std::filesystem::remove(dir / "step-000040/manifest.json");
  run_ranks(2, [&](Context context) {
    ModelShard shard(context.rank(), 2);
    EXPECT_EQ(load_checkpoint(context.communicator(), dir.path(), shard.views())->step, 30);
  });
}

TEST(LoadTest, RefusesAnotherModelWithAllDifferencesAndChangesNothing) {
  const TempDir dir;
  save(2, dir.path(), 1);
  auto other = test_model();
  other[0].name = "embedding.weight";
  other[1].dtype = DType::kFloat16;
  other[4].shape = {3, 2, 4, 3};
  other[4].strides = {24, 1, 6, 2};
  bool untouched = false;
  EXPECT_THAT(
      failed_load(3, dir.path(), other, &untouched),
      AllOf(HasSubstr("missing in the checkpoint: embedding.weight (nearest: embed.weight)"),
            HasSubstr("not asked for by the model: embed.weight"), HasSubstr("norm.bias expected F16, got BF16"),
            HasSubstr("conv.weight expected [3, 2, 4, 3], got [3, 4, 2, 3]")));
  EXPECT_TRUE(untouched);
}

TEST(LoadTest, NamesTheOptimizerStateThatIsMissing) {
  const TempDir dir;
  auto weights_only = test_model();
  std::erase_if(weights_only, [](const ModelTensor& tensor) { return tensor.kind == ShardKind::kOptimizer; });
  save(2, dir.path(), 1, weights_only);
  EXPECT_THAT(failed_load(2, dir.path(), test_model()), HasSubstr("missing in the checkpoint: exp_avg.embed.weight"));
}

TEST(LoadTest, ReadsATiedNameFromItsTensor) {
  const TempDir dir;
  save(2, dir.path(), 1);
  auto untied = test_model();
  untied.push_back(untied[0]);
  untied.back().name = "head.weight";
  run_ranks(2, [&](Context context) {
    ModelShard shard(untied, context.rank(), 2);
    ASSERT_TRUE(load_checkpoint(context.communicator(), dir.path(), shard.views()));
    const std::vector<std::byte> embed = test_bytes("embed.weight", DType::kFloat32, {11, 6});
    const ShardView& head = shard.views().back();
    EXPECT_TRUE(std::equal(head.data, head.data + (head.end - head.begin) * 4, embed.begin() + head.begin * 4));
  });
}

TEST(LoadTest, FindsAndNamesABitFlippedInAnyExtent) {
  const TempDir dir;
  save(2, dir.path(), 1);
  const Manifest manifest = parse_manifest(read_file(dir / "step-000001/manifest.json"));
  for (const ManifestExtent& extent : manifest.extents) {
    const std::string& file = manifest.files[extent.file].name;
    const std::uint64_t byte = extent.begin + (extent.end - extent.begin) / 2;
    flip_bit(dir / "step-000001" / file, byte, 5);
    EXPECT_THAT(
        failed_load(3, dir.path(), test_model()),
        AllOf(HasSubstr(file + ": tensor " + manifest.tensors[extent.tensor].name + ", bytes [" +
                        std::to_string(extent.begin) + ", " + std::to_string(extent.end) + ")"),
              HasSubstr("do not match their checksum"), HasSubstr("load of " + (dir / "step-000001").string())));
    flip_bit(dir / "step-000001" / file, byte, 5);
  }
  EXPECT_EQ(failed_load(3, dir.path(), test_model()), "loaded");
}

TEST(LoadTest, FindsABitFlippedInAnyHeaderOrRankFile) {
  const TempDir dir;
  save(2, dir.path(), 1);
  const Manifest manifest = parse_manifest(read_file(dir / "step-000001/manifest.json"));
  for (const ManifestFile& file : manifest.files) {
    for (const std::uint64_t byte : {std::uint64_t{0}, std::uint64_t{40}, file.head_bytes - 1}) {
      flip_bit(dir / "step-000001" / file.name, byte);
      EXPECT_THAT(failed_load(2, dir.path(), test_model()), AllOf(HasSubstr(file.name), HasSubstr("header"))) << byte;
      flip_bit(dir / "step-000001" / file.name, byte);
    }
  }
  flip_bit(dir / "step-000001/rank/rng-00001-of-00002.safetensors", 4097);
  EXPECT_THAT(failed_load(2, dir.path(), test_model()),
              AllOf(HasSubstr("failed on rank 1"), HasSubstr("rng-00001-of-00002"), HasSubstr("tensor rng")));
}

TEST(LoadTest, FindsMissingAndShortFilesBeforeItChangesAnything) {
  const TempDir dir;
  save(2, dir.path(), 1);
  const Manifest manifest = parse_manifest(read_file(dir / "step-000001/manifest.json"));
  const std::filesystem::path last = dir / "step-000001" / manifest.files.back().name;
  const std::string bytes = read_file(last);
  bool untouched = false;
  write_file(last, bytes.substr(0, bytes.size() - 1));
  EXPECT_THAT(failed_load(2, dir.path(), test_model(), &untouched),
              AllOf(HasSubstr(manifest.files.back().name), HasSubstr("expected"), HasSubstr("bytes, got")));
  EXPECT_TRUE(untouched);
  std::filesystem::remove(last);
  EXPECT_THAT(failed_load(2, dir.path(), test_model(), &untouched),
              AllOf(HasSubstr(manifest.files.back().name), HasSubstr("No such file")));
  EXPECT_TRUE(untouched);
}

TEST(LoadTest, RefusesADamagedManifestInsteadOfAnOlderStep) {
  const TempDir dir;
  save(1, dir.path(), 1);
  save(1, dir.path(), 2);
  flip_bit(dir / "step-000002/manifest.json", 100);
  EXPECT_THAT(failed_load(2, dir.path(), test_model()),
              AllOf(HasSubstr("step-000002/manifest.json: its text does not match the checksum"),
                    HasSubstr("move this step's directory away")));
}

TEST(LoadTest, RefusesAStepUnderAnotherNumber) {
  const TempDir dir;
  save(1, dir.path(), 1);
  std::filesystem::rename(dir / "step-000001", dir / "step-000009");
  EXPECT_THAT(failed_load(2, dir.path(), test_model()), HasSubstr("describes step 1"));
}

TEST(LoadTest, RefusesFilesReachedThroughALink) {
  const TempDir dir;
  save(1, dir.path(), 1);
  std::filesystem::rename(dir / "step-000001/model", dir / "elsewhere");
  std::filesystem::create_directory_symlink(dir / "elsewhere", dir / "step-000001/model");
  EXPECT_THAT(failed_load(1, dir.path(), test_model()), HasSubstr("open " + (dir / "step-000001/model").string()));
  std::filesystem::rename(dir / "step-000001", dir / "other");
  std::filesystem::create_directory_symlink(dir / "other", dir / "step-000001");
  EXPECT_THAT(failed_load(1, dir.path(), test_model()), HasSubstr("open " + (dir / "step-000001").string()));
}

TEST(LoadTest, FollowsALinkToTheWholeDirectory) {
  const TempDir dir;
  save(1, dir / "runs", 1);
  std::filesystem::create_directory_symlink(dir / "runs", dir / "link");
  EXPECT_EQ(failed_load(2, dir / "link", test_model()), "loaded");
  save(2, dir / "link", 2);
  EXPECT_TRUE(std::filesystem::exists(dir / "runs/step-000002"));
}

TEST(LoadTest, GivesTheFaultOfOneRankToAllWhicheverCallFails) {
  const TempDir dir;
  save(2, dir.path(), 1);
  int calls = 0, reported = 0;
  for (int call = -1; call < calls; ++call) {  // the first time nothing fails: that counts the calls
    std::vector<std::string> messages(3);
    run_ranks(3, [&](Context context) {
      FaultyFileSystem system;
      if (context.rank() == 2) system.fail_at = call;
      ModelShard shard(context.rank(), 3);
      try {
        ASSERT_TRUE(load_checkpoint(context.communicator(), system, dir.path(), shard.views()));
        EXPECT_TRUE(shard.is_filled());
      } catch (const CheckpointError& error) {
        messages[static_cast<std::size_t>(context.rank())] = error.what();
      }
      if (context.rank() == 2) calls = std::max(calls, static_cast<int>(system.calls.size()));
    });
    if (messages[0].empty()) continue;  // the close of a file that was read says nothing
    ++reported;
    for (const std::string& message : messages) {
      EXPECT_EQ(message, messages[0]);
      EXPECT_THAT(message, AllOf(HasSubstr("failed on rank 2: "), HasSubstr("Input/output error")));
    }
  }
  EXPECT_GT(reported, 20);
}

}  // namespace
}  // namespace fsdp
