// Two ranks make sure of each other, with somebody between them who changes a byte.
#include "comm/greeting.h"

#include <array>
#include <atomic>
#include <functional>
#include <thread>

#include <gtest/gtest.h>
#include <poll.h>
#include <sys/socket.h>

namespace fsdp {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

enum class Direction { kToHost, kToGuest };

// Passes bytes on both ways between a guest and a door; the one at `offset` of one way comes out different.
class Meddler {
 public:
  struct Change {
    Direction direction = Direction::kToHost;
    std::size_t offset = 0;
  };

  Meddler(const TcpAddress& door, std::optional<Change> change) : change_(change) {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) != 0) std::abort();
    guest_ = UniqueFd(ends[0]);
    inner_ = UniqueFd(ends[1]);
    outer_ = connect_to(door, Clock::now() + 5s).value();
    thread_ = std::jthread([this](const std::stop_token& stop) {
      while (!stop.stop_requested() && pass(Direction::kToHost) && pass(Direction::kToGuest)) {
      }
      ::shutdown(outer_.get(), SHUT_RDWR);
      ::shutdown(inner_.get(), SHUT_RDWR);
    });
  }

  const UniqueFd& guest() const { return guest_; }
  std::size_t passed(Direction direction) const { return passed_[static_cast<std::size_t>(direction)]; }

 private:
  // Waits for a moment. False once an end is closed.
  bool pass(Direction direction) {
    const bool to_host = direction == Direction::kToHost;
    const UniqueFd &from = to_host ? inner_ : outer_, &to = to_host ? outer_ : inner_;
    pollfd fd{from.get(), POLLIN, 0};
    if (::poll(&fd, 1, 1) <= 0) return true;
    std::array<std::byte, 256> bytes;
    const ssize_t got = ::recv(from.get(), bytes.data(), bytes.size(), 0);
    if (got <= 0) return false;
    const auto part = std::span(bytes).first(static_cast<std::size_t>(got));
    std::atomic<std::size_t>& passed = passed_[static_cast<std::size_t>(direction)];
    if (change_ && change_->direction == direction && change_->offset - passed < part.size())
      part[change_->offset - passed] ^= std::byte{0x10};
    passed += part.size();
    return send_all(to, part, Clock::now() + 5s);
  }

  const std::optional<Change> change_;
  UniqueFd guest_, inner_, outer_;
  std::array<std::atomic<std::size_t>, 2> passed_{};
  std::jthread thread_;  // last: it uses all of the above
};

class GreetingTest : public testing::Test {
 protected:
  struct Outcome {
    bool guest_is_sure = false;
    std::optional<Guest> guest;
    std::size_t to_host = 0, to_guest = 0;  // bytes
  };

  Outcome meet(std::optional<Meddler::Change> change) {
    Meddler meddler(door_.address(), change);
    Outcome outcome;
    std::thread guest([&] {
      outcome.guest_is_sure = greet(meddler.guest(), token_, {.rank = 3, .world_size = 4}, Clock::now() + 5s);
      if (!outcome.guest_is_sure) ::shutdown(meddler.guest().get(), SHUT_RDWR);
    });
    const int turned_away = door_.turned_away();
    while (!outcome.guest && door_.turned_away() == turned_away) outcome.guest = door_.next(Clock::now() + 10ms);
    guest.join();
    outcome.to_host = meddler.passed(Direction::kToHost);
    outcome.to_guest = meddler.passed(Direction::kToGuest);
    return outcome;
  }

  const JobToken token_ = random_token();
  Door door_{listen_at(resolve("127.0.0.1", 0).front()), token_};
};

TEST_F(GreetingTest, IsBelievedAsItWasSaid) {
  const Outcome outcome = meet(std::nullopt);
  EXPECT_TRUE(outcome.guest_is_sure);
  ASSERT_TRUE(outcome.guest);
  EXPECT_EQ(outcome.guest->greeting.rank, 3);
  EXPECT_EQ(outcome.guest->greeting.world_size, 4);
}

TEST_F(GreetingTest, OneChangedByteOfAGuestsWordsKeepsItOut) {
  const std::size_t bytes = meet(std::nullopt).to_host;
  ASSERT_GT(bytes, sizeof(Greeting) + sizeof(Mac) + sizeof(Nonce));
  for (std::size_t offset = 0; offset < bytes; ++offset)
    EXPECT_FALSE(meet(Meddler::Change{Direction::kToHost, offset}).guest) << "byte " << offset;
  EXPECT_EQ(door_.turned_away(), static_cast<int>(bytes));
  EXPECT_TRUE(meet(std::nullopt).guest) << "the door is as good as before";
}

TEST_F(GreetingTest, OneChangedByteOfTheHostsAnswerIsSeenByTheGuest) {
  const std::size_t bytes = meet(std::nullopt).to_guest;
  ASSERT_GT(bytes, sizeof(Mac));
  for (std::size_t offset = 0; offset < bytes; ++offset)
    EXPECT_FALSE(meet(Meddler::Change{Direction::kToGuest, offset}).guest_is_sure) << "byte " << offset;
}

// Who has heard a whole greeting has nothing with which to come in itself.
TEST_F(GreetingTest, AGreetingIsOfUseOnce) {
  std::vector<std::byte> heard;
  {
    const UniqueFd eavesdropper = listen_at(resolve("127.0.0.1", 0).front());
    auto guest = connect_to(local_address(eavesdropper), Clock::now() + 5s).value();
    std::optional<UniqueFd> inner;
    while (!inner) inner = accept_from(eavesdropper);
    auto outer = connect_to(door_.address(), Clock::now() + 5s).value();
    std::thread speaker([&] { EXPECT_TRUE(greet(guest, token_, {.rank = 1, .world_size = 2}, Clock::now() + 5s)); });
    const auto pass = [](const UniqueFd& from, const UniqueFd& to, std::size_t bytes, std::vector<std::byte>& kept) {
      kept.resize(kept.size() + bytes);
      const auto part = std::span(kept).last(bytes);
      ASSERT_TRUE(receive_all(from, part, Clock::now() + 5s));
      ASSERT_TRUE(send_all(to, part, Clock::now() + 5s));
    };
    constexpr std::size_t kHello = sizeof(std::uint64_t) + sizeof(Nonce), kAnswer = kHello + sizeof(Mac);
    std::vector<std::byte> answer;
    pass(*inner, outer, kHello, heard);
    EXPECT_FALSE(door_.next(Clock::now() + 50ms));  // answers the hello
    pass(outer, *inner, kAnswer, answer);
    pass(*inner, outer, sizeof(Mac) + sizeof(Greeting), heard);
    speaker.join();
    EXPECT_TRUE(door_.next(Clock::now() + 5s)) << "the first time";
  }
  const auto again = connect_to(door_.address(), Clock::now() + 5s).value();
  ASSERT_TRUE(send_all(again, heard, Clock::now() + 5s));
  const int turned_away = door_.turned_away();
  while (door_.turned_away() == turned_away) ASSERT_FALSE(door_.next(Clock::now() + 10ms));
}

}  // namespace
}  // namespace fsdp
