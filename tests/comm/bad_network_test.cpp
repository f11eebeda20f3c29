// Two ranks over a connection that is slow, stops for a while, tears, or comes in crumbs. What heals in time changes no bit;
// what does not ends both ranks with the name of the other.
#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <thread>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <fsdp/testing.h>

#include "comm/tcp_socket.h"
#include "tests/comm/rank_processes.h"

namespace fsdp {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::ContainsRegex;
using testing::HasSubstr;
using testing::StartsWith;
using Clock = std::chrono::steady_clock;

constexpr auto kMet = 1500ms;   // by then they exchange
constexpr auto kFarewell = 2s;  // that a rank waits for peers to take its last words

// What becomes of bytes on their way, counted from the first connection.
struct Weather {
  std::chrono::milliseconds delay{0};                 // of every byte, each way
  std::size_t bytes_at_once = std::size_t{64} << 10;  // passed on together
  std::chrono::milliseconds calm{0};                  // between two such parts
  std::chrono::milliseconds cut_at{-1}, cut_for{0};   // nothing passes for a while; -1 = never
  std::chrono::milliseconds tear_at{-1};              // all connections are reset
};

// Takes the connections that come to its port to another, in such weather.
class Proxy {
 public:
  Proxy(const TcpAddress& target, const Weather& weather)
      : target_(target), weather_(weather), listener_(listen_at(resolve("127.0.0.1", 0).front())) {}
  int port() const { return local_address(listener_).port(); }
  // From here on there is a thread in this process.
  void start() {
    thread_ = std::jthread([this](const std::stop_token& stop) { serve(stop); });
  }

 private:
  struct Parcel {
    Clock::time_point due;
    std::vector<std::byte> bytes;
  };
  struct Way {
    UniqueFd* from;
    UniqueFd* to;
    std::vector<Parcel> waiting = {};
    Clock::time_point next = {};
    bool is_over = false;
  };
  struct Pair {
    UniqueFd guest, host;
    Clock::time_point since = Clock::now();
    std::array<Way, 2> ways{};
  };

  void serve(const std::stop_token& stop) {
    while (!stop.stop_requested()) {
      while (auto guest = accept_from(listener_)) {
        auto host = connect_to(target_, Clock::now() + 5s);
        if (!host) continue;
        if (pairs_.empty()) begin_ = Clock::now();
        auto& pair = pairs_.emplace_back(std::make_unique<Pair>());
        pair->guest = std::move(*guest);
        pair->host = std::move(*host);
        pair->ways = {Way{&pair->guest, &pair->host}, Way{&pair->host, &pair->guest}};
      }
      const auto age = Clock::now() - begin_;
      if (weather_.tear_at >= 0ms && age >= weather_.tear_at) return tear();
      const bool is_cut = weather_.cut_at >= 0ms && age >= weather_.cut_at && age < weather_.cut_at + weather_.cut_for;
      bool moved = false;
      for (auto& pair : pairs_) {
        for (Way& way : pair->ways) moved |= !is_cut && pass(way);
      }
      if (!moved) std::this_thread::sleep_for(1ms);
    }
  }

  bool pass(Way& way) {
    bool moved = false;
    std::vector<std::byte> bytes(weather_.bytes_at_once);
    const auto now = Clock::now();
    const ssize_t got = way.is_over || way.waiting.size() > 64 ? -1
                                                               : ::recv(way.from->get(), bytes.data(), bytes.size(), 0);
    if (got >= 0) {
      bytes.resize(static_cast<std::size_t>(got));
      way.is_over = got == 0;
      way.waiting.push_back({now + weather_.delay, std::move(bytes)});
      moved = true;
    }
    while (!way.waiting.empty() && way.waiting.front().due <= now && way.next <= now) {
      const Parcel& parcel = way.waiting.front();
      if (parcel.bytes.empty()) {
        ::shutdown(way.to->get(), SHUT_WR);
      } else if (!send_all(*way.to, parcel.bytes, now + 5s)) {
        way.is_over = true;
      }
      way.waiting.erase(way.waiting.begin());
      way.next = now + weather_.calm;
      moved = true;
    }
    return moved;
  }

  void tear() {
    for (auto& pair : pairs_) {
      for (const UniqueFd* socket : {&pair->guest, &pair->host}) {
        const linger at_once{1, 0};
        ::setsockopt(socket->get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof(at_once));
      }
    }
    pairs_.clear();
  }

  const TcpAddress target_;
  const Weather weather_;
  const UniqueFd listener_;
  Clock::time_point begin_ = Clock::now();
  std::vector<std::unique_ptr<Pair>> pairs_;
  std::jthread thread_;
};

// Everything that ranks exchange, for `rounds` rounds: a digest of what came.
std::string exchange(Communicator& communicator, int rounds) {
  constexpr std::int64_t kNumel = 3000;
  const auto ranks = static_cast<std::size_t>(communicator.world_size());
  const auto segment = communicator.allocate(kNumel * sizeof(float));
  std::vector<float> own(kNumel * ranks), output(kNumel * ranks);
  std::uint64_t digest = 14695981039346656037U;
  const auto digest_all = [&](std::span<const float> values) {
    for (const std::byte byte : std::as_bytes(values))
      digest = (digest ^ static_cast<std::uint64_t>(byte)) * 1099511628211U;
  };
  const auto raw = [](std::vector<float>& values) { return reinterpret_cast<std::byte*>(values.data()); };
  for (int round = 0; round < rounds; ++round) {
    for (std::size_t i = 0; i < own.size(); ++i)
      own[i] = 1.0F / static_cast<float>(1 + i + static_cast<std::size_t>(100 * communicator.rank() + round));
    std::memcpy(segment->local().data(), own.data(), segment->bytes());
    communicator.barrier();
    communicator.gather({segment.get(), 0, segment->bytes(), raw(output), "layers.0"});
    digest_all(output);
    communicator.all_gather(std::as_bytes(std::span(own).first(kNumel)), std::as_writable_bytes(std::span(output)));
    digest_all(output);
    communicator.reduce_scatter(raw(own), raw(output), kNumel, DType::kFloat32);
    communicator.all_gather(std::as_bytes(std::span(output).first(kNumel)), std::as_writable_bytes(std::span(own)));
    digest_all(own);
    communicator.barrier();
  }
  return std::to_string(digest);
}

std::string undisturbed(int rounds) {
  std::string digest;
  run_ranks(2, [&](const Context& context) {
    const std::string own = exchange(context.communicator(), rounds);
    if (context.is_main()) digest = own;
  });
  return digest;
}

class BadNetworkTest : public testing::Test {
 protected:
  void run(const Weather& weather, const InitOptions& options, int rounds) {
    const JobPlace job(folder_.path());
    const TcpAddress rank_0 = resolve("127.0.0.1", static_cast<std::uint16_t>(job.port())).front();
    Proxy proxy(rank_0, weather);
    for (const int rank : {0, 1}) {
      auto variables = job.variables("tcp", rank, 2);
      if (rank == 1) variables["MASTER_PORT"] = std::to_string(proxy.port());
      processes_.start(variables, [&] { return exchange(init(options).communicator(), rounds); });
    }
    for (const int rank : {0, 1}) pids_.push_back(processes_.pid(rank));
    proxy.start();
    for (const int rank : {0, 1}) outcomes_.push_back(processes_.outcome(rank));
  }

  void expect_the_same(const Weather& weather, int rounds) {
    run(weather, {.timeout = 15s, .silence = 5s}, rounds);
    const std::string digest = undisturbed(rounds);
    EXPECT_THAT(outcomes_, testing::ElementsAre(digest, digest));
  }

  PrivateFolder folder_;
  RankProcesses processes_;
  std::vector<pid_t> pids_;  // by rank, as the next
  std::vector<std::string> outcomes_;
};

TEST_F(BadNetworkTest, ADelayOf200MsChangesNoBit) { expect_the_same({.delay = 200ms}, 2); }

TEST_F(BadNetworkTest, CrumbsChangeNoBit) { expect_the_same({.bytes_at_once = 7}, 3); }

TEST_F(BadNetworkTest, ASlowLinkChangesNoBit) { expect_the_same({.bytes_at_once = 4096, .calm = 2ms}, 10); }

TEST_F(BadNetworkTest, ACutOf3SecondsThatHealsChangesNoBit) { expect_the_same({.cut_at = 100ms, .cut_for = 3s}, 400); }

TEST_F(BadNetworkTest, ACutThatDoesNotHealEndsBothRanksByTheSilence) {
  const auto begin = Clock::now();
  run({.cut_at = kMet, .cut_for = 1h}, {.timeout = 60s, .silence = 3s}, 1'000'000);
  EXPECT_LT(Clock::now() - begin, kMet + 3s + 2s);
  for (const int rank : {0, 1}) {
    EXPECT_THAT(outcomes_[static_cast<std::size_t>(rank)],
                ContainsRegex(fmt::format("rank {} takes no further part: it has been silent for 3 s, last in .*pid {}",
                                          1 - rank, pids_[static_cast<std::size_t>(1 - rank)])));
  }
}

TEST_F(BadNetworkTest, ACutThatDoesNotHealEndsBothRanksByTheTimeout) {
  const auto begin = Clock::now();
  run({.cut_at = kMet, .cut_for = 1h}, {.timeout = 2s, .silence = 0ms}, 1'000'000);
  EXPECT_LT(Clock::now() - begin, kMet + 2s + 2s + kFarewell);
  for (const int rank : {0, 1}) {
    EXPECT_THAT(outcomes_[static_cast<std::size_t>(rank)],
                AllOf(HasSubstr("timed out on rank"), HasSubstr(fmt::format("rank {} (pid ", 1 - rank))));
  }
}

TEST_F(BadNetworkTest, AConnectionThatTearsEndsBothRanksAtOnce) {
  const auto begin = Clock::now();
  run({.tear_at = kMet}, {.timeout = 60s, .silence = 0ms}, 1'000'000);
  EXPECT_LT(Clock::now() - begin, kMet + 2s);
  for (const int rank : {0, 1})
    EXPECT_THAT(outcomes_[static_cast<std::size_t>(rank)],
                AllOf(StartsWith("error: "), HasSubstr(fmt::format("rank {} (pid {}) died, last in ", 1 - rank,
                                                                   pids_[static_cast<std::size_t>(1 - rank)]))));
}

}  // namespace
}  // namespace fsdp
