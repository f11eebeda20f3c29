#include "comm/stream_copy.h"

#include <algorithm>
#include <vector>

#include <gtest/gtest.h>

namespace fsdp {
namespace {

TEST(StreamCopyTest, CopiesEveryByteAndNoOtherAtAnyAlignment) {
  constexpr std::size_t kMargin = 128;
  constexpr std::byte kUntouched{0xee};
  std::vector<std::byte> input(kStreamCopyBytes + 2 * kMargin);
  for (std::size_t i = 0; i < input.size(); ++i) input[i] = static_cast<std::byte>(i * 7 + i / 251);
  for (const std::size_t bytes : {std::size_t{0}, std::size_t{1}, kStreamCopyBytes - 1, kStreamCopyBytes,
                                  kStreamCopyBytes + 1, kStreamCopyBytes + 63}) {
    for (const std::size_t to : {0U, 1U, 16U, 63U}) {
      for (const std::size_t from : {0U, 3U, 32U}) {
        std::vector<std::byte> output(bytes + 2 * kMargin, kUntouched);
        stream_copy(output.data() + to, input.data() + from, bytes);
        const auto begin = output.begin() + static_cast<std::ptrdiff_t>(to),
                   end = begin + static_cast<std::ptrdiff_t>(bytes);
        EXPECT_TRUE(std::equal(begin, end, input.begin() + static_cast<std::ptrdiff_t>(from)));
        EXPECT_EQ(std::count(output.begin(), begin, kUntouched), static_cast<std::ptrdiff_t>(to));
        EXPECT_EQ(std::count(end, output.end(), kUntouched), output.end() - end);
      }
    }
  }
}

}  // namespace
}  // namespace fsdp
