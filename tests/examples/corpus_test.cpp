#include "examples/train_gpt/corpus.h"

#include <cmath>
#include <fstream>
#include <functional>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace gpt {
namespace {

namespace fs = std::filesystem;
using ::testing::HasSubstr;

// Every byte tells its place modulo 251.
std::string counting_text(std::size_t bytes) {
  std::string text(bytes, '\0');
  for (std::size_t i = 0; i < bytes; ++i) text[i] = static_cast<char>(i % 251);
  return text;
}

std::string message_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const DataError& error) {
    return error.what();
  }
  return "no DataError";
}

class CorpusFilesTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::path(::testing::TempDir()) /
              ("corpus_" + std::string(::testing::UnitTest::GetInstance()->current_test_info()->name()));
    fs::remove_all(folder_);
    fs::create_directories(folder_);
  }
  void TearDown() override { fs::remove_all(folder_); }
  fs::path write(const std::string& name, const std::string& text) {
    fs::create_directories((folder_ / name).parent_path());
    std::ofstream(folder_ / name, std::ios::binary) << text;
    return folder_ / name;
  }
  fs::path folder_;
};

TEST(CorpusTest, GlobalBatchIsTheSameForEveryWorldSize) {
  const Corpus corpus(counting_text(100'000), 16);
  const auto whole = corpus.batch({.seed = 3, .step = 7, .global_rows = 12, .rank = 0, .world_size = 1});
  EXPECT_EQ(whole.rows, 12);
  for (const int world_size : {2, 3, 4, 6}) {
    std::vector<std::uint8_t> joined;
    for (int rank = 0; rank < world_size; ++rank) {
      const auto part = corpus.batch({.seed = 3, .step = 7, .global_rows = 12, .rank = rank, .world_size = world_size});
      EXPECT_EQ(part.rows, 12 / world_size);
      joined.insert(joined.end(), part.bytes.begin(), part.bytes.end());
    }
    EXPECT_EQ(joined, whole.bytes) << "world size " << world_size;
  }
}

TEST(CorpusTest, BatchesDifferBetweenStepsSeedsAndRows) {
  const Corpus corpus(counting_text(100'000), 16);
  const auto batch = corpus.batch({.seed = 1, .step = 0, .global_rows = 2});
  EXPECT_NE(batch.bytes, corpus.batch({.seed = 1, .step = 1, .global_rows = 2}).bytes);
  EXPECT_NE(batch.bytes, corpus.batch({.seed = 2, .step = 0, .global_rows = 2}).bytes);
  EXPECT_FALSE(std::equal(batch.bytes.begin(), batch.bytes.begin() + 17, batch.bytes.begin() + 17));
}

TEST(CorpusTest, WindowsHoldOneByteMoreThanTheContext) {
  const Corpus corpus(counting_text(100'000), 16);
  const auto batch = corpus.batch({.seed = 1, .step = 0, .global_rows = 3});
  EXPECT_EQ(batch.length, 17);
  EXPECT_EQ(batch.bytes.size(), 3u * 17u);
}

TEST(CorpusTest, EveryTwentiethBlockIsHeldOut) {
  // 2,000 bytes are 20 blocks of 100, of which the last is held out.
  std::string text(2'000, 'a');
  std::fill(text.begin() + 1'900, text.end(), 'z');
  const Corpus corpus(text, 16);
  EXPECT_EQ(corpus.train_bytes(), 1'900);
  EXPECT_EQ(corpus.held_out_bytes(), 100);
  EXPECT_EQ(corpus.held_out_window(0, 5).bytes, std::vector<std::uint8_t>(17, 'z'));
  EXPECT_EQ(corpus.held_out_window(4, 5).bytes, std::vector<std::uint8_t>(17, 'z'));
  EXPECT_EQ(corpus.batch({.seed = 1, .step = 0, .global_rows = 1}).bytes, std::vector<std::uint8_t>(17, 'a'));
}

TEST(CorpusTest, HeldOutWindowsReachFromTheFirstByteToTheLast) {
  const Corpus corpus(counting_text(2'000), 16);
  EXPECT_EQ(corpus.held_out_window(0, 3).bytes.front(), 1'900 % 251);
  EXPECT_EQ(corpus.held_out_window(2, 3).bytes.back(), 1'999 % 251);
}

TEST(CorpusTest, BigramEntropyOfAlternatingBytesIsZero) {
  std::string text;
  for (int i = 0; i < 5'000; ++i) text += "ab";
  EXPECT_NEAR(Corpus(text, 16).bigram_entropy(), 0.0, 1e-12);
}

TEST(CorpusTest, BigramEntropyOfAFairChoiceIsLnTwo) {
  // After 'a' comes 'a' or 'b', after 'b' too, equally often: the text "aabb" again and again.
  std::string text;
  for (int i = 0; i < 50'000; ++i) text += "aabb";
  EXPECT_NEAR(Corpus(text, 16).bigram_entropy(), std::log(2.0), 1e-4);
}

TEST(CorpusTest, ContextLongerThanTheTextIsRefusedWithBothLengths) {
  const auto message = message_of([] { Corpus(counting_text(1'000), 64); });
  EXPECT_THAT(message, HasSubstr("--context 64 is longer than the text"));
  EXPECT_THAT(message, HasSubstr("950 to train on and 50 held out"));
}

TEST_F(CorpusFilesTest, FoldersAreReadInSortedOrderAndOnlyTheirText) {
  write("b.h", std::string(1'000, 'b'));
  write("a/deep.cpp", std::string(1'000, 'a'));
  write("c.bin", std::string(1'000, 'c'));
  const auto corpus = Corpus::read({folder_}, 8);
  EXPECT_EQ(corpus.files(), 2);
  EXPECT_EQ(corpus.train_bytes() + corpus.held_out_bytes(), 2'000);
  EXPECT_EQ(corpus.held_out_window(0, 1).bytes, std::vector<std::uint8_t>(9, 'b'));
}

TEST_F(CorpusFilesTest, FilesNamedDirectlyAreReadWhateverTheyAreCalled) {
  EXPECT_EQ(Corpus::read({write("data.bin", std::string(1'000, 'c'))}, 8).train_bytes(), 950);
}

TEST_F(CorpusFilesTest, MissingPathIsRefusedByName) {
  EXPECT_THAT(message_of([&] { Corpus::read({folder_ / "nowhere"}, 8); }), HasSubstr((folder_ / "nowhere").string()));
}

TEST_F(CorpusFilesTest, EmptyFileIsRefused) {
  const auto path = write("empty.txt", "");
  EXPECT_THAT(message_of([&] { Corpus::read({path}, 8); }), HasSubstr("are empty"));
}

TEST_F(CorpusFilesTest, FolderWithoutTextIsRefusedWithTheExtensionsThatCount) {
  write("picture.png", "x");
  EXPECT_THAT(message_of([&] { Corpus::read({folder_}, 8); }),
              ::testing::AllOf(HasSubstr("holds no text"), HasSubstr(".cpp")));
}

}  // namespace
}  // namespace gpt
