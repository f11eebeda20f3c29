#include "comm/meeting_file.h"

#include <fstream>

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <fsdp/error.h>

#include "tests/comm/rank_processes.h"

namespace fsdp {
namespace {

MeetingFile example() {
  MeetingFile file{.job = "17/0/ of somebody", .token = {}, .addresses = {}};
  for (std::size_t i = 0; i < file.token.size(); ++i) file.token[i] = static_cast<std::byte>(7 * i);
  file.addresses = {*to_numeric_address("10.0.0.7", 29500), *to_numeric_address("fe80::1", 1)};
  return file;
}

void expect_equal(const std::optional<MeetingFile>& file, const MeetingFile& expected) {
  ASSERT_TRUE(file.has_value());
  EXPECT_EQ(to_text(*file), to_text(expected));
}

TEST(MeetingFileTest, ReadsWhatItHasWritten) {
  const PrivateFolder folder;
  const auto path = folder.path() / "meet";
  EXPECT_FALSE(read_meeting_file(path));
  MeetingFile file = example();
  write_meeting_file(path, file);
  expect_equal(read_meeting_file(path), file);
  file.job.clear();
  write_meeting_file(path, file);
  expect_equal(read_meeting_file(path), file);
  EXPECT_EQ(folder.entries(), std::vector<std::string>{"meet"});
  struct stat status {};
  ASSERT_EQ(::stat(path.c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 0777, 0600U);
}

// A reader may see any part of a file on a file system that does not rename as a whole.
TEST(MeetingFileTest, NoPartOfOneIsTakenForOne) {
  const std::string text = to_text(example());
  std::size_t wholes = 0;
  for (std::size_t bytes = 0; bytes < text.size(); ++bytes) {
    if (const auto file = parse_meeting_file(std::string_view(text).substr(0, bytes))) {
      ++wholes;
      EXPECT_EQ(file->addresses.size(), 1U) << "the first line of two is one that stands alone";
    }
  }
  EXPECT_EQ(wholes, 1U);
}

TEST(MeetingFileTest, NothingElseIsTakenForOne) {
  const std::string text = to_text(example());
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string changed = text;
    changed.replace(changed.find(from), from.size(), to);
    return changed;
  };
  EXPECT_TRUE(parse_meeting_file(text));
  for (const std::string& junk :
       {with("meeting 1", "meeting 2"), with("job ", "jobs "), with("job ", ""), with("token 00", "token 0"),
        with("token 00", "token 0g"), with("at 10.0.0.7", "at localhost"), with("at 10.0.0.7", "at"),
        with("29500", "0"), with("29500", "65536"), with("29500", "295 00"), text + "at\n", text + "\n",
        text + std::string(kMaxMeetingFileBytes, 'x'), std::string("fsdp-meeting 1\n"), std::string(1000, '\0')})
    EXPECT_FALSE(parse_meeting_file(junk)) << junk.substr(0, 300);
}

TEST(MeetingFileTest, OneThatOthersMayReadIsNotRead) {
  const PrivateFolder folder;
  const auto path = folder.path() / "meet";
  write_meeting_file(path, example());
  ASSERT_EQ(::chmod(path.c_str(), 0644), 0);
  EXPECT_FALSE(read_meeting_file(path));
  const auto link = folder.path() / "link";
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  std::filesystem::create_symlink(path, link);
  EXPECT_FALSE(read_meeting_file(link));
  EXPECT_TRUE(read_meeting_file(path));
}

TEST(MeetingFileTest, SaysWhereItCannotBeWritten) {
  const PrivateFolder folder;
  try {
    write_meeting_file(folder.path() / "no" / "meet", example());
    FAIL() << "written";
  } catch (const CommunicationError& error) {
    EXPECT_NE(std::string(error.what()).find("no/meet: open failed: No such file"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace fsdp
