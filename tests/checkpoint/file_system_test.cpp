#include "checkpoint/file_system.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sys/stat.h>

#include <fsdp/error.h>

#include "checkpoint/job_lock.h"
#include "tests/checkpoint/faulty_file_system.h"
#include "tests/support/temp_dir.h"

namespace fsdp {
namespace {

using testing::HasSubstr;
using testing::ThrowsMessage;

std::span<const std::byte> bytes_of(const std::string& text) { return std::as_bytes(std::span(text)); }

class FileSystemTest : public testing::Test {
 protected:
  TempDir dir_;
  FaultyFileSystem system_;
};

TEST_F(FileSystemTest, WritesAndReadsThroughInterruptsAndShortTransfers) {
  system_.stutter = true;
  const std::string text(1234, 'x');
  File file = File::create(system_, dir_ / "a", 0600);
  file.reserve(text.size());
  file.write(0, bytes_of(text));
  file.sync();
  file.close();
  EXPECT_GE(std::ranges::count(system_.calls, "pwrite"), 13);
  EXPECT_EQ(File::open(system_, dir_ / "a").read_text(2000), text);
}

TEST_F(FileSystemTest, CreatesOnlyWhatDoesNotExist) {
  write_file(dir_ / "a", "old");
  EXPECT_THAT([&] { File::create(system_, dir_ / "a", 0600); },
              ThrowsMessage<CheckpointError>(HasSubstr("File exists")));
  std::filesystem::create_symlink(dir_ / "elsewhere", dir_ / "link");
  EXPECT_THROW(File::create(system_, dir_ / "link", 0600), CheckpointError);
  EXPECT_FALSE(std::filesystem::exists(dir_ / "elsewhere"));
}

TEST_F(FileSystemTest, FollowsALinkThatTheUserNamed) {
  write_file(dir_ / "file", "x");
  std::filesystem::create_symlink(dir_ / "file", dir_ / "link");
  EXPECT_EQ(File::open(system_, dir_ / "link").read_text(1), "x");
}

TEST_F(FileSystemTest, OpensRegularFilesOnly) {
  std::filesystem::create_directory(dir_ / "directory");
  write_file(dir_ / "file", "x");
  std::filesystem::create_symlink(dir_ / "file", dir_ / "link");
  ASSERT_EQ(::mkfifo((dir_ / "pipe").c_str(), 0600), 0);
  EXPECT_THAT([&] { File::open(system_, dir_ / "directory"); },
              ThrowsMessage<CheckpointError>(HasSubstr("regular file")));
  EXPECT_THAT([&] { File::open(system_, dir_ / "pipe"); }, ThrowsMessage<CheckpointError>(HasSubstr("regular file")));
  EXPECT_THAT([&] { File::open_beneath(system_, dir_.path(), "link"); },
              ThrowsMessage<CheckpointError>(HasSubstr("symbolic link")));
  EXPECT_THAT([&] { File::open_lock(system_, dir_ / "link"); },
              ThrowsMessage<CheckpointError>(HasSubstr("symbolic link")));
}

TEST_F(FileSystemTest, DoesNotLeaveTheRootThroughALinkedDirectory) {
  std::filesystem::create_directory(dir_ / "root");
  std::filesystem::create_directory(dir_ / "outside");
  write_file(dir_ / "outside" / "secret", "x");
  std::filesystem::create_directory_symlink(dir_ / "outside", dir_ / "root" / "model");
  EXPECT_THROW(File::open_beneath(system_, dir_ / "root", "model/secret"), CheckpointError);
}

TEST_F(FileSystemTest, NamesPathReasonAndSpaceOnAFullDisk) {
  system_.error = ENOSPC;
  File file = File::create(system_, dir_ / "big", 0600);
  system_.fail_at = static_cast<int>(system_.calls.size());
  EXPECT_THAT([&] { file.reserve(12345); },
              ThrowsMessage<CheckpointError>(testing::AllOf(HasSubstr("big: No space left on device"),
                                                            HasSubstr("12345 bytes needed"), HasSubstr("free"))));
}

TEST_F(FileSystemTest, FindsAFileThatEndsEarly) {
  write_file(dir_ / "short", "123");
  std::vector<std::byte> bytes(5);
  const File file = File::open(system_, dir_ / "short");
  EXPECT_THAT([&] { file.read(0, bytes); }, ThrowsMessage<CheckpointError>(HasSubstr("ends at byte 3")));
  EXPECT_THAT([&] { file.read_text(2); }, ThrowsMessage<CheckpointError>(HasSubstr("at most 2 bytes")));
}

TEST_F(FileSystemTest, ReportsAFailedClose) {
  File file = File::create(system_, dir_ / "a", 0600);
  system_.fail_at = static_cast<int>(system_.calls.size());
  EXPECT_THAT([&] { file.close(); }, ThrowsMessage<CheckpointError>(HasSubstr("close")));
}

TEST_F(FileSystemTest, RemovesATreeButNotWhatItsLinksPointTo) {
  std::filesystem::create_directories(dir_ / "tree" / "sub");
  std::filesystem::create_directory(dir_ / "kept");
  write_file(dir_ / "kept" / "file", "x");
  write_file(dir_ / "tree" / "sub" / "file", "x");
  std::filesystem::create_directory_symlink(dir_ / "kept", dir_ / "tree" / "link");
  remove_tree(system_, dir_ / "tree");
  remove_tree(system_, dir_ / "tree");  // nothing there is fine
  EXPECT_EQ(files_below(dir_.path()), std::vector<std::string>{"kept/file"});
}

TEST_F(FileSystemTest, ExchangesTwoDirectories) {
  for (const char* name : {"a", "b"}) {
    std::filesystem::create_directory(dir_ / name);
    write_file(dir_ / name / "file", name);
  }
  exchange_paths(system_, dir_ / "a", dir_ / "b");
  EXPECT_EQ(read_file(dir_ / "a" / "file"), "b");
  EXPECT_EQ(read_file(dir_ / "b" / "file"), "a");
}

TEST_F(FileSystemTest, SaysWhatToDoWhereDirectoriesCannotBeExchanged) {
  system_.error = EINVAL;
  system_.fail_at = 0;
  EXPECT_THAT([&] { exchange_paths(system_, "a", "b"); }, ThrowsMessage<CheckpointError>(HasSubstr("remove b first")));
}

TEST_F(FileSystemTest, MakesADirectoryWithItsParents) {
  make_directories(system_, dir_ / "a" / "b" / "c");
  make_directories(system_, dir_ / "a" / "b" / "c");
  EXPECT_TRUE(std::filesystem::is_directory(dir_ / "a" / "b" / "c"));
  // Each new name is made durable in the directory above it.
  EXPECT_EQ(std::ranges::count(system_.calls, "fsync"), 3);
}

TEST_F(FileSystemTest, GivesTheLockToOneHolderAndFreesItWithTheHandle) {
  {
    const JobLock lock(system_, dir_.path());
    EXPECT_THAT([&] { JobLock(system_, dir_.path()); },
                ThrowsMessage<CheckpointError>(testing::AllOf(HasSubstr("is being written by host "),
                                                              HasSubstr(" pid " + std::to_string(::getpid()) + ":"))));
  }
  EXPECT_NO_THROW(JobLock(system_, dir_.path()));
}

}  // namespace
}  // namespace fsdp
