#include "cli/output_prefixer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <string_view>
#include <vector>

namespace fsdp {
namespace {

using testing::ElementsAre;
using testing::IsEmpty;

class OutputPrefixerTest : public testing::Test {
 protected:
  OutputPrefixer make(bool terminal = false) {
    return {"[r1] ", terminal, [this](std::string_view line) { lines_.emplace_back(line); }};
  }
  std::vector<std::string> lines_;
};

TEST_F(OutputPrefixerTest, StartsEachLineWithThePrefix) {
  auto prefixer = make();
  prefixer.feed("one\n\ntwo\n");
  EXPECT_THAT(lines_, ElementsAre("[r1] one\n", "[r1] \n", "[r1] two\n"));
}

TEST_F(OutputPrefixerTest, KeepsALineBackUntilItsEndHasCome) {
  auto prefixer = make();
  prefixer.feed("be");
  prefixer.feed("gin");
  EXPECT_THAT(lines_, IsEmpty());
  prefixer.feed("ning\nnext");
  EXPECT_THAT(lines_, ElementsAre("[r1] beginning\n"));
}

TEST_F(OutputPrefixerTest, EndsTheLastLineOfAStream) {
  auto prefixer = make();
  prefixer.feed("done\nalmost");
  prefixer.finish();
  prefixer.finish();
  EXPECT_THAT(lines_, ElementsAre("[r1] done\n", "[r1] almost\n"));
}

TEST_F(OutputPrefixerTest, GivesTheSameLinesHoweverTheBytesAreCut) {
  const std::string text = "a\r\nbb\r10%\r20%\n\r30%\r\r\nend\r";
  const auto collect = [&](std::size_t step) {
    lines_.clear();
    auto prefixer = make();
    for (std::size_t i = 0; i < text.size(); i += step) prefixer.feed(std::string_view(text).substr(i, step));
    prefixer.finish();
    return lines_;
  };
  const auto whole = collect(text.size());
  EXPECT_THAT(whole,
              ElementsAre("[r1] a\n", "[r1] bb\n", "[r1] 10%\n", "[r1] 20%\n", "[r1] 30%\n", "[r1] \n", "[r1] end\n"));
  for (std::size_t step = 1; step < text.size(); ++step)
    EXPECT_EQ(collect(step), whole) << "cut every " << step << " bytes";
}

TEST_F(OutputPrefixerTest, LetsProgressRewriteItsLineOnATerminal) {
  auto prefixer = make(true);
  prefixer.feed("\r10%\r20%\ndone\r\n");
  EXPECT_THAT(lines_, ElementsAre("[r1] 10%\r", "[r1] 20%\n", "[r1] done\n"));
}

TEST_F(OutputPrefixerTest, MakesLinesOfProgressInAFile) {
  auto prefixer = make(false);
  prefixer.feed("\r10%\r20%\n");
  EXPECT_THAT(lines_, ElementsAre("[r1] 10%\n", "[r1] 20%\n"));
}

TEST_F(OutputPrefixerTest, KeepsALongLineInOnePiece) {
  auto prefixer = make();
  const std::string line(64 << 10, 'x');
  for (const char c : line) prefixer.feed({&c, 1});
  prefixer.feed("\n");
  EXPECT_THAT(lines_, ElementsAre("[r1] " + line + "\n"));
}

TEST_F(OutputPrefixerTest, CutsALineThatNeverEnds) {
  auto prefixer = make();
  prefixer.feed(std::string(OutputPrefixer::kMaxLineBytes + 1, 'x'));
  ASSERT_EQ(lines_.size(), 1u);
  EXPECT_EQ(lines_[0].size(), OutputPrefixer::kMaxLineBytes + std::string("[r1] \n").size());
  prefixer.finish();
  EXPECT_EQ(lines_.back(), "[r1] x\n");
}

}  // namespace
}  // namespace fsdp
