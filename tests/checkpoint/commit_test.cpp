#include "checkpoint/commit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

#include "checkpoint/job_lock.h"
#include "checkpoint/manifest.h"
#include "checkpoint/safetensors.h"
#include "tests/checkpoint/faulty_file_system.h"
#include "tests/checkpoint/model_shard.h"
#include "tests/support/temp_dir.h"

namespace fsdp {
namespace {

using testing::AllOf;
using testing::HasSubstr;
using testing::ThrowsMessage;

void save(int world_size, const std::filesystem::path& dir, std::int64_t step) {
  run_ranks(world_size, [&](Context context) {
    ModelShard shard(context.rank(), context.world_size());
    shard.fill();
    CheckpointContent content = shard.content(step);
    content.rank_state = {{"rng", {std::byte{1}, std::byte(context.rank())}}};
    EXPECT_EQ(save_checkpoint(context.communicator(), dir, content), dir / "step-000005");
  });
}

SafetensorsHeader header_of(const std::filesystem::path& path) {
  FileSystem system;
  const File file = File::open(system, path);
  return read_safetensors_header(file.bytes(),
                                 [&](std::uint64_t offset, std::span<std::byte> bytes) { file.read(offset, bytes); });
}

ModelTensor matrix(ShardKind kind, const std::string& name) { return {name, kind, DType::kFloat32, {3, 6}, {6, 1}}; }

TEST(CommitTest, LaysFilesOutAsDocumented) {
  const TempDir dir;
  run_ranks(2, [&](Context context) {
    ModelShard shard({matrix(ShardKind::kParameter, "w"),
                      {"s", ShardKind::kParameter, DType::kInt64, {}, {}},
                      {"exp_avg.s", ShardKind::kOptimizer, DType::kFloat32, {}, {}}},
                     context.rank(), 2);  // 19 elements of parameters: rank 0 has w[0, 10)
    shard.fill();
    CheckpointContent content{
        .step = 5, .views = shard.views(), .tied = {}, .scalars = {}, .rank_state = {{"rng", {std::byte{7}}}}};
    save_checkpoint(context.communicator(), dir / "runs", content);
  });
  EXPECT_EQ(files_below(dir.path()),
            (std::vector<std::string>{"runs/.lock", "runs/latest", "runs/step-000005/manifest.json",
                                      "runs/step-000005/model/shard-00001-model-00001-of-00002.safetensors",
                                      "runs/step-000005/model/shard-00001-model-00002-of-00002.safetensors",
                                      "runs/step-000005/model/shard-00002-model-00001-of-00002.safetensors",
                                      "runs/step-000005/model/shard-00002-model-00002-of-00002.safetensors",
                                      "runs/step-000005/optim/shard-00001-model-00001-of-00001.safetensors",
                                      "runs/step-000005/rank/rng-00000-of-00002.safetensors",
                                      "runs/step-000005/rank/rng-00001-of-00002.safetensors"}));
  EXPECT_EQ(read_file(dir / "runs/latest"), "step-000005\n");

  const auto head = header_of(dir / "runs/step-000005/model/shard-00002-model-00001-of-00002.safetensors");
  EXPECT_EQ(head.metadata.at("DCP_SHARDING_INFO"), R"({"w":{"saved_offsets":[2,0]},"s":{"saved_offsets":[]}})");
  EXPECT_EQ(head.metadata.at("DCP_VERSION"), "1.0");
  EXPECT_EQ(head.metadata.at("format"), "pt");
  EXPECT_EQ(head.data_begin % 4096, 0U);
  EXPECT_EQ(head.tensors[0].shape, std::vector<std::int64_t>{});  // s, 8 bytes an element, goes first
  EXPECT_EQ(head.tensors[1].shape, (std::vector<std::int64_t>{1, 6}));
  const auto crumb = header_of(dir / "runs/step-000005/model/shard-00002-model-00002-of-00002.safetensors");
  EXPECT_EQ(crumb.metadata.at("DCP_SHARDING_INFO"), R"({"w":{"saved_offsets":[1,4]}})");
  EXPECT_EQ(header_of(dir / "runs/step-000005/optim/shard-00001-model-00001-of-00001.safetensors").tensors[0].shape,
            std::vector<std::int64_t>{1});
}

TEST(CommitTest, KeepsItsFilesFromOthers) {
  const TempDir dir;
  save(2, dir / "runs", 5);
  for (const auto& entry : std::filesystem::recursive_directory_iterator(dir / "runs" / "step-000005")) {
    EXPECT_EQ(entry.status().permissions(), static_cast<std::filesystem::perms>(entry.is_directory() ? 0700 : 0600))
        << entry.path();
  }
}

TEST(CommitTest, DescribesEveryFileAndExtentInTheManifest) {
  const TempDir dir;
  save(3, dir.path(), 5);
  const Manifest manifest = parse_manifest(read_file(dir / "step-000005/manifest.json"));
  EXPECT_NO_THROW(check_coverage(manifest));
  EXPECT_EQ(manifest.step, 5);
  EXPECT_EQ(manifest.world_size, 3);
  EXPECT_EQ(manifest.tied, (std::map<std::string, std::string>{{"head.weight", "embed.weight"}}));
  EXPECT_EQ(manifest.scalars.at("offset"), -3);
  EXPECT_EQ(manifest.tensors.size(), test_model().size());
  std::vector<std::string> listed{"manifest.json"};
  for (const ManifestFile& file : manifest.files) {
    listed.push_back(file.name);
    EXPECT_EQ(std::filesystem::file_size(dir / "step-000005" / file.name), file.bytes) << file.name;
    EXPECT_EQ(header_of(dir / "step-000005" / file.name).metadata.at("save_id"), manifest.save_id);
  }
  std::ranges::sort(listed);
  EXPECT_EQ(files_below(dir / "step-000005"), listed);
}

TEST(CommitTest, ReplacesTheSameStepByOneExchange) {
  const TempDir dir;
  save(2, dir.path(), 5);
  const std::string first = parse_manifest(read_file(dir / "step-000005/manifest.json")).save_id;
  write_file(dir / "step-000005/model/stray", "goes with the old directory");
  save(1, dir.path(), 5);
  const Manifest second = parse_manifest(read_file(dir / "step-000005/manifest.json"));
  EXPECT_NE(second.save_id, first);
  EXPECT_EQ(second.world_size, 1);
  for (const std::string& name : files_below(dir.path())) EXPECT_EQ(name.find("tmp"), std::string::npos) << name;
  EXPECT_FALSE(std::filesystem::exists(dir / "step-000005/model/stray"));
}

TEST(CommitTest, RemovesWhatDeadSavesLeftAndNothingElse) {
  const TempDir dir;
  for (const char* name : {"step-000003.tmp-0123456789abcdef", "step-000003.tmp-mine", "notes"}) {
    std::filesystem::create_directory(dir / name);
    write_file(dir / name / "file", "x");
  }
  save(2, dir.path(), 5);
  EXPECT_FALSE(std::filesystem::exists(dir / "step-000003.tmp-0123456789abcdef"));
  EXPECT_TRUE(std::filesystem::exists(dir / "step-000003.tmp-mine/file"));
  EXPECT_TRUE(std::filesystem::exists(dir / "notes/file"));
}

TEST(CommitTest, SyncsEveryFileAndDirectoryBeforeTheRenameAndTheParentAfterIt) {
  const TempDir dir;
  FaultyFileSystem system;
  run_ranks(1, [&](Context context) {
    ModelShard shard(0, 1);
    save_checkpoint(context.communicator(), system, dir.path(), shard.content(1));
  });
  const auto commit = std::ranges::find(system.calls, "rename");
  ASSERT_NE(commit, system.calls.end());
  // model, optim, manifest; model/, optim/, rank/ and the step's own directory.
  EXPECT_EQ(std::count(system.calls.begin(), commit, "fsync"), 7);
  // The text of the lock, 2 heads, the tensors but 3 empty ones, the manifest.
  EXPECT_EQ(std::count(system.calls.begin(), commit, "pwrite"), 1 + 2 + static_cast<int>(test_model().size()) - 3 + 1);
  EXPECT_EQ(*(commit + 1), "open");
  EXPECT_EQ(*(commit + 2), "fsync");
}

// Whatever a rank throws must be the same on all: collects the messages of the ranks that failed.
std::vector<std::string> failures(int world_size, const std::function<void(Context)>& body) {
  std::vector<std::string> messages(static_cast<std::size_t>(world_size));
  run_ranks(world_size, [&](Context context) {
    try {
      body(context);
    } catch (const CheckpointError& error) {
      messages[static_cast<std::size_t>(context.rank())] = error.what();
    }
  });
  return messages;
}

void expect_all(const std::vector<std::string>& messages, const testing::Matcher<const std::string&>& matcher) {
  for (const std::string& message : messages) {
    EXPECT_EQ(message, messages.front());
    EXPECT_THAT(message, matcher);
  }
}

TEST(CommitTest, RefusesAnUnwritableDirectoryOnAllRanks) {
  const TempDir dir;
  write_file(dir / "file", "");
  expect_all(failures(3,
                      [&](Context context) {
                        save_checkpoint(context.communicator(), dir / "file", ModelShard(context.rank(), 3).content(1));
                      }),
             AllOf(HasSubstr("save of step 1 to "), HasSubstr("failed on rank 0: "), HasSubstr("Not a directory")));
}

TEST(CommitTest, RefusesRanksThatDisagree) {
  const TempDir dir;
  expect_all(failures(3,
                      [&](Context context) {
                        save_checkpoint(context.communicator(), dir.path(),
                                        ModelShard(context.rank(), 3).content(context.rank() == 2 ? 8 : 7));
                      }),
             HasSubstr("failed on rank 2: expected step 7 as on rank 0, got 8"));
  expect_all(failures(2,
                      [&](Context context) {
                        CheckpointContent content = ModelShard(context.rank(), 2).content(7);
                        content.scalars["epoch"] = context.rank();
                        save_checkpoint(context.communicator(), dir.path(), content);
                      }),
             HasSubstr("failed on rank 1: expected the tied names and scalars of rank 0"));
  EXPECT_TRUE(files_below(dir.path()).empty());
}

TEST(CommitTest, RefusesAModelThatTheRanksHoldInPartOrTwice) {
  const TempDir dir;
  const auto with_range = [&](std::int64_t begin, std::int64_t end) {
    return failures(2, [&, begin, end](Context context) {
      ModelShard whole({matrix(ShardKind::kParameter, "w")}, 0, 1);
      if (context.rank() == 1) {
        whole.views()[0].begin = begin;
        whole.views()[0].end = end;
      } else {
        whole.views()[0].end = 9;
      }
      save_checkpoint(context.communicator(), dir.path(),
                      {.step = 1, .views = whole.views(), .tied = {}, .scalars = {}, .rank_state = {}});
    });
  };
  expect_all(with_range(10, 18), HasSubstr("w: the ranks hold 17 elements"));
  expect_all(with_range(8, 18), HasSubstr("w: the ranks hold more than the 18 elements"));
  expect_all(with_range(8, 17), HasSubstr("overlap"));
  EXPECT_EQ(files_below(dir.path()), std::vector<std::string>{".lock"});
}

TEST(CommitTest, RefusesTiesToNothingAndBadNamesOfRankState) {
  const TempDir dir;
  expect_all(failures(2,
                      [&](Context context) {
                        ModelShard shard(context.rank(), 2);
                        CheckpointContent content = shard.content(1);
                        content.tied["a"] = "nothing";
                        save_checkpoint(context.communicator(), dir.path(), content);
                      }),
             HasSubstr("no parameter is named nothing"));
  expect_all(failures(2,
                      [&](Context context) {
                        ModelShard shard(context.rank(), 2);
                        CheckpointContent content = shard.content(1);
                        content.rank_state["../rng"] = {};
                        save_checkpoint(context.communicator(), dir.path(), content);
                      }),
             HasSubstr("rank state \"../rng\""));
}

TEST(CommitTest, DoesNotTouchAForeignDirectoryOfThatName) {
  const TempDir dir;
  std::filesystem::create_directory(dir / "step-000005");
  write_file(dir / "step-000005/thesis", "x");
  expect_all(failures(2,
                      [&](Context context) {
                        save_checkpoint(context.communicator(), dir.path(), ModelShard(context.rank(), 2).content(5));
                      }),
             HasSubstr("holds no manifest.json"));
  EXPECT_EQ(read_file(dir / "step-000005/thesis"), "x");
}

// Another process that holds the lock until it is told to end.
class LockHolder {
 public:
  explicit LockHolder(const std::filesystem::path& dir) {
    int ends[2];
    if (::pipe(ends) != 0) throw std::runtime_error("pipe");
    process_ = ::fork();
    if (process_ == 0) {
      FileSystem system;
      const JobLock lock(system, dir);
      if (::write(ends[1], "x", 1) != 1) ::_exit(1);
      for (;;) ::pause();
    }
    char ready = 0;
    if (::read(ends[0], &ready, 1) != 1) throw std::runtime_error("the lock holder ended");
    ::close(ends[0]);
    ::close(ends[1]);
  }
  ~LockHolder() {
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
  }
  pid_t process() const { return process_; }

 private:
  pid_t process_;
};

TEST(CommitTest, RefusesWhileAnotherProcessWritesAndGoesOnWhenItIsDead) {
  const TempDir dir;
  {
    const LockHolder holder(dir.path());
    expect_all(failures(2,
                        [&](Context context) {
                          save_checkpoint(context.communicator(), dir.path(), ModelShard(context.rank(), 2).content(5));
                        }),
               AllOf(HasSubstr("is being written by host "), HasSubstr("pid " + std::to_string(holder.process()))));
  }
  save(2, dir.path(), 5);
}

}  // namespace
}  // namespace fsdp
