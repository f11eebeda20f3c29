#include "checkpoint/consolidate.h"

#include <algorithm>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>

#include "checkpoint/safetensors.h"
#include "tests/checkpoint/faulty_file_system.h"
#include "tests/checkpoint/model_shard.h"
#include "tests/support/temp_dir.h"

namespace fsdp {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

std::vector<ModelTensor> parameters() {
  auto model = test_model();
  std::erase_if(model, [](const ModelTensor& tensor) { return tensor.kind != ShardKind::kParameter; });
  return model;
}

std::vector<TensorInfo> infos() {
  std::vector<TensorInfo> all;
  for (const ModelTensor& tensor : parameters()) all.push_back({tensor.name, tensor.dtype, tensor.shape});
  return all;
}

void fetch(const TensorInfo& info, std::span<std::byte> bytes) {
  const std::vector<std::byte> expected = test_bytes(info.name, info.dtype, info.shape);
  ASSERT_EQ(bytes.size(), expected.size());
  std::ranges::copy(expected, bytes.begin());
}

class ConsolidateTest : public testing::Test {
 protected:
  void write(const std::map<std::string, std::string>& metadata = {}) {
    write_consolidated(file_, infos(), metadata, fetch);
  }

  TempDir dir_;
  std::filesystem::path file_ = dir_ / "model.safetensors";
};

TEST_F(ConsolidateTest, ComesBackBitEqualAtEveryWorldSize) {
  write();
  for (int world_size = 1; world_size <= 5; ++world_size) {
    for (int rank = 0; rank < world_size; ++rank) {
      ModelShard shard(parameters(), rank, world_size);
      read_consolidated(file_, shard.views());
      EXPECT_TRUE(shard.is_filled()) << rank << " of " << world_size;
    }
  }
}

TEST_F(ConsolidateTest, ReadsALargePermutedTensorInParts) {
  const ModelTensor tensor{"t", ShardKind::kParameter, DType::kFloat32, {3000, 1000}, {1, 3000}};
  write_consolidated(file_, {{"t", DType::kFloat32, {3000, 1000}}}, {}, fetch);
  ModelShard shard({tensor}, 1, 3);
  read_consolidated(file_, shard.views());
  EXPECT_TRUE(shard.is_filled());
}

TEST_F(ConsolidateTest, WritesTheMetadataAndNoTemporaryFile) {
  write({{"head.weight", "embed.weight"}});
  EXPECT_EQ(files_below(dir_.path()), std::vector<std::string>{"model.safetensors"});
  FileSystem system;
  const File file = File::open(system, file_);
  const auto header = read_safetensors_header(
      file.bytes(), [&](std::uint64_t offset, std::span<std::byte> bytes) { file.read(offset, bytes); });
  EXPECT_EQ(header.metadata, (std::map<std::string, std::string>{{"format", "pt"}, {"head.weight", "embed.weight"}}));
}

TEST_F(ConsolidateTest, HoldsOneTensorAtATime) {
  std::size_t largest = 0;
  const std::byte* last = nullptr;
  bool same_memory = true;
  std::vector<TensorInfo> equal;
  for (int i = 0; i < 4; ++i) equal.push_back({"t" + std::to_string(i), DType::kFloat32, {1000}});
  write_consolidated(file_, equal, {}, [&](const TensorInfo&, std::span<std::byte> bytes) {
    largest = std::max(largest, bytes.size());
    same_memory = same_memory && (last == nullptr || last == bytes.data());
    last = bytes.data();
  });
  EXPECT_EQ(largest, 4000U);
  EXPECT_TRUE(same_memory);
}

TEST_F(ConsolidateTest, KeepsTheOldFileWhenAnyCallFails) {
  write();
  const std::string old = read_file(file_);
  std::size_t calls = 0, reported = 0;
  for (int call = 0; call == 0 || static_cast<std::size_t>(call) < calls; ++call) {
    FaultyFileSystem system;
    system.fail_at = call;
    const std::vector<TensorInfo> tensors{{"other", DType::kFloat32, {3}}};
    bool failed = false;
    try {
      write_consolidated(system, file_, {tensors, {}, fetch});
    } catch (const CheckpointError&) {
      failed = true;
      ++reported;
    }
    calls = std::max(calls, system.calls.size());
    const bool renamed = std::ranges::find(system.calls, "rename") != system.calls.end();
    EXPECT_TRUE(renamed || failed);
    EXPECT_TRUE(renamed || read_file(file_) == old) << "call " << call;
    EXPECT_EQ(files_below(dir_.path()), std::vector<std::string>{"model.safetensors"}) << "call " << call;
    write_file(file_, old);
  }
  EXPECT_GE(reported, 9U);  // open, allocate, 2 writes, fsync, close, rename, open and fsync of the directory
}

TEST_F(ConsolidateTest, LeavesNothingBehindWhenFetchThrows) {
  EXPECT_THROW(
      write_consolidated(file_, infos(), {},
                         [](const TensorInfo&, std::span<std::byte>) { throw std::runtime_error("peer died"); }),
      std::runtime_error);
  EXPECT_TRUE(files_below(dir_.path()).empty());
}

TEST_F(ConsolidateTest, RefusesAnotherModelAndChangesNothing) {
  write();
  auto other = parameters();
  other[0].name = "embedding.weight";
  other[1].shape = {6};
  ModelShard shard(other, 0, 1);
  EXPECT_THAT([&] { read_consolidated(file_, shard.views()); },
              ThrowsMessage<CheckpointError>(testing::AllOf(HasSubstr(file_.string()),
                                                            HasSubstr("embedding.weight (nearest: embed.weight)"),
                                                            HasSubstr("norm.bias expected [6], got [7]"))));
  EXPECT_TRUE(shard.is_clear());
}

TEST_F(ConsolidateTest, RefusesADamagedFileByName) {
  write();
  const std::string bytes = read_file(file_);
  write_file(file_, bytes.substr(0, bytes.size() - 1));
  ModelShard shard(parameters(), 0, 1);
  EXPECT_THAT([&] { read_consolidated(file_, shard.views()); },
              ThrowsMessage<CheckpointError>(testing::AllOf(HasSubstr("model.safetensors: "), HasSubstr("damaged"))));
  EXPECT_TRUE(shard.is_clear());
}

TEST_F(ConsolidateTest, FindsTiedNamesInMetadataAndModel) {
  // The file knows that head.weight is embed.weight; the model has both names as tensors of their own.
  write({{"head.weight", "embed.weight"}});
  auto untied = parameters();
  untied.push_back(untied[0]);
  untied.back().name = "head.weight";
  ModelShard shard(untied, 0, 1);
  EXPECT_NO_THROW(read_consolidated(file_, shard.views()));
  EXPECT_TRUE(std::equal(shard.views()[0].data, shard.views()[0].data + 66 * 4, shard.views().back().data));

  // The model ties two names of which the file holds only the second, or both.
  auto renamed = parameters();
  renamed[0].name = "head.weight";
  ModelShard by_second(renamed, 0, 1);
  EXPECT_NO_THROW(read_consolidated(dir_ / "model.safetensors", by_second.views(), {{"embed.weight", "head.weight"}}));
  std::vector<TensorInfo> both = infos();
  both.push_back({"head.weight", DType::kFloat32, {11, 6}});
  write_consolidated(file_, both, {}, fetch);
  ModelShard tied(parameters(), 0, 1);
  EXPECT_THROW(read_consolidated(file_, tied.views()), CheckpointError);
  EXPECT_NO_THROW(read_consolidated(file_, tied.views(), {{"head.weight", "embed.weight"}}));
  EXPECT_TRUE(tied.is_filled());
}

}  // namespace
}  // namespace fsdp
