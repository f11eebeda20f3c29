// Ranks whose collective calls differ: every pair of calls that can meet is found on every rank, with both named, before a
// byte of one rank has come to another.
#include <algorithm>
#include <array>
#include <atomic>
#include <functional>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fsdp/error.h>
#include <fsdp/testing.h>

namespace fsdp {
namespace {

using testing::AllOf;
using testing::HasSubstr;

constexpr int kWorldSize = 3, kOdd = 1;
constexpr std::size_t kBytes = 64;  // of each rank's part
constexpr auto kTimeout = std::chrono::seconds(10);

// What the calls of one rank read and write. What comes from elsewhere shows, as no rank holds the same.
struct Buffers {
  explicit Buffers(int rank) : own(kWorldSize * kBytes, byte_of(rank)), output(own.size(), std::byte{0xee}) {}
  static std::byte byte_of(int rank) { return static_cast<std::byte>(0x10 + rank); }
  std::span<const std::byte> part() const { return std::span(own).first(kBytes); }
  std::vector<std::byte> own, output;
};

struct Call {
  std::string name;  // as errors say it
  std::function<void(Communicator&, Buffers&)> make;
};

const Call kAllocate{"allocate of 64 bytes", [](Communicator& c, Buffers&) { c.allocate(64); }};
const Call kBoard{"allocate_board of 64 bytes", [](Communicator& c, Buffers&) { c.allocate_board(8); }};
const Call kAllGather{"all_gather of 64 bytes", [](Communicator& c, Buffers& b) { c.all_gather(b.part(), b.output); }};
const Call kReduceScatter{"reduce_scatter of 64 bytes (F32 sum)", [](Communicator& c, Buffers& b) {
                            c.reduce_scatter(b.own.data(), b.output.data(), kBytes / 4, DType::kFloat32);
                          }};
const Call kBroadcast{"broadcast of 64 bytes from rank 0",
                      [](Communicator& c, Buffers& b) { c.broadcast(std::span(b.own).first(kBytes), 0); }};
const Call kBarrier{"barrier of 0 bytes", [](Communicator& c, Buffers&) { c.barrier(); }};

Call all_reduce(std::int64_t numel, DType dtype, ReduceOp op) {
  constexpr const char* kOps[] = {"sum", "max", "min"};
  return {
      fmt::format("all_reduce of {} bytes ({} {})", bytes_of(numel, dtype), name_of(dtype), kOps[static_cast<int>(op)]),
      [=](Communicator& c, Buffers& b) { c.all_reduce(b.own.data(), numel, dtype, op); }};
}

struct Pair {
  Call usual, odd;
};
void PrintTo(const Pair& pair, std::ostream* out) { *out << pair.usual.name << " and " << pair.odd.name; }

std::vector<Pair> every_pair() {
  const Call reduced = all_reduce(16, DType::kFloat32, ReduceOp::kSum);
  const std::vector<Call> calls{kAllocate, kBoard, kAllGather, kReduceScatter, reduced, kBroadcast, kBarrier};
  std::vector<Pair> pairs;
  for (const Call& usual : calls) {
    for (const Call& odd : calls) {
      if (usual.name != odd.name) pairs.push_back({usual, odd});
    }
  }
  const auto sized = [](Call call, const std::string& name, auto make) {
    call.name = name;
    call.make = make;
    return call;
  };
  pairs.push_back(
      {kAllocate, sized(kAllocate, "allocate of 65 bytes", [](Communicator& c, Buffers&) { c.allocate(65); })});
  pairs.push_back(
      {kBoard, sized(kBoard, "allocate_board of 72 bytes", [](Communicator& c, Buffers&) { c.allocate_board(9); })});
  pairs.push_back({kAllGather, sized(kAllGather, "all_gather of 60 bytes", [](Communicator& c, Buffers& b) {
                     c.all_gather(b.part().first(60), std::span(b.output).first(180));
                   })});
  pairs.push_back(
      {kReduceScatter, sized(kReduceScatter, "reduce_scatter of 60 bytes (F32 sum)", [](Communicator& c, Buffers& b) {
         c.reduce_scatter(b.own.data(), b.output.data(), 15, DType::kFloat32);
       })});
  pairs.push_back(
      {kReduceScatter, sized(kReduceScatter, "reduce_scatter of 64 bytes (I32 sum)", [](Communicator& c, Buffers& b) {
         c.reduce_scatter(b.own.data(), b.output.data(), 16, DType::kInt32);
       })});
  pairs.push_back({kBroadcast, sized(kBroadcast, "broadcast of 64 bytes from rank 2", [](Communicator& c, Buffers& b) {
                     c.broadcast(std::span(b.own).first(kBytes), 2);
                   })});
  pairs.push_back({kBroadcast, sized(kBroadcast, "broadcast of 63 bytes from rank 0",
                                     [](Communicator& c, Buffers& b) { c.broadcast(std::span(b.own).first(63), 0); })});
  pairs.push_back({reduced, all_reduce(15, DType::kFloat32, ReduceOp::kSum)});
  pairs.push_back({reduced, all_reduce(16, DType::kInt32, ReduceOp::kSum)});
  pairs.push_back({reduced, all_reduce(32, DType::kBFloat16, ReduceOp::kSum)});
  pairs.push_back({reduced, all_reduce(16, DType::kFloat32, ReduceOp::kMax)});
  return pairs;
}

class DesyncTest : public testing::TestWithParam<const char*> {};

TEST_P(DesyncTest, EveryPairOfCallsIsFoundBeforeDataIsMixed) {
  const auto pairs = every_pair();
  ASSERT_GE(pairs.size(), 50U);
  for (const Pair& pair : pairs) {
    SCOPED_TRACE(testing::PrintToString(pair));
    std::atomic<int> found{0};
    run_ranks(kWorldSize,
              [&](const Context& context) {
                Buffers buffers(context.rank());
                const Call& call = context.rank() == kOdd ? pair.odd : pair.usual;
                try {
                  call.make(context.communicator(), buffers);
                } catch (const InvalidArgument& error) {
                  EXPECT_THAT(error.what(),
                              AllOf(HasSubstr("rank 0 is in " + pair.usual.name + ", rank 1 in " + pair.odd.name),
                                    HasSubstr(fmt::format("(seen on rank {})", context.rank())),
                                    HasSubstr("every rank must make the same calls in the same order")));
                  EXPECT_EQ(error.rank(), kOdd);
                  ++found;
                }
                const auto is_foreign = [&](std::byte byte) {
                  return byte != Buffers::byte_of(context.rank()) && byte != std::byte{0xee};
                };
                EXPECT_TRUE(std::none_of(buffers.own.begin(), buffers.own.end(), is_foreign));
                EXPECT_TRUE(std::none_of(buffers.output.begin(), buffers.output.end(), is_foreign));
              },
              {.backend = GetParam(), .timeout = kTimeout});
    EXPECT_EQ(found, kWorldSize);
  }
}

// One call too many, or too few, meets the next one; or nobody, where that was the last.
TEST_P(DesyncTest, AnExtraCallIsFoundAtTheNextOneOrAtTheEnd) {
  const auto errors = [&](bool has_next) {
    std::array<std::string, kWorldSize> texts;
    const auto begin = std::chrono::steady_clock::now();
    run_ranks(kWorldSize,
              [&](const Context& context) {
                Buffers buffers(context.rank());
                try {
                  if (context.rank() == kOdd) kAllGather.make(context.communicator(), buffers);
                  if (has_next) kBarrier.make(context.communicator(), buffers);
                } catch (const Error& error) {
                  texts[static_cast<std::size_t>(context.rank())] = error.what();
                }
              },
              {.backend = GetParam(), .timeout = kTimeout});
    EXPECT_LT(std::chrono::steady_clock::now() - begin, kTimeout);
    return texts;
  };
  EXPECT_THAT(errors(true),
              testing::Each(HasSubstr("rank 0 is in barrier of 0 bytes, rank 1 in all_gather of 64 bytes")));
  EXPECT_THAT(errors(false)[kOdd], AllOf(HasSubstr("has left"), HasSubstr("waits for it in all_gather")));
}

INSTANTIATE_TEST_SUITE_P(, DesyncTest, testing::Values("thread", "shm", "tcp"),
                         [](const auto& instance) { return std::string(instance.param); });

}  // namespace
}  // namespace fsdp
