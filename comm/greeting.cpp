#include "comm/greeting.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include <poll.h>
#include <sys/socket.h>

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::seconds kPatience{5};
constexpr std::size_t kMaxStrangers = 256;
constexpr std::uint64_t kMagic = 0x4673'6470'0001'0001;  // "Fsdp", protocol 1

struct GuestHello {
  std::uint64_t magic = kMagic;
  Nonce nonce{};
};
struct HostHello {
  std::uint64_t magic = kMagic;
  Nonce nonce{};
  Mac mac{};
};
struct SignedGreeting {
  Mac mac{};
  Greeting greeting;
};

template <class Message>
std::span<const std::byte> bytes_of_message(const Message& message) {
  return std::as_bytes(std::span(&message, 1));
}

std::span<const std::byte> text(const char* word) { return std::as_bytes(std::span(word, std::strlen(word))); }

Mac mac_of_host(const JobToken& token, const Nonce& guest, const Nonce& host) {
  return authenticate(token, {text("host"), guest, host});
}

Mac mac_of_guest(const JobToken& token, const Nonce& guest, const Nonce& host, const Greeting& greeting) {
  return authenticate(token, {text("guest"), host, guest, bytes_of_message(greeting)});
}

}  // namespace

bool greet(const UniqueFd& socket, const JobToken& token, const Greeting& greeting, Clock::time_point deadline) {
  const GuestHello hello{.nonce = random_nonce()};
  HostHello answer;
  if (!send_all(socket, bytes_of_message(hello), deadline) ||
      !receive_all(socket, std::as_writable_bytes(std::span(&answer, 1)), deadline) || answer.magic != kMagic ||
      !are_equal(answer.mac, mac_of_host(token, hello.nonce, answer.nonce))) {
    return false;
  }
  SignedGreeting message;
  message.greeting = greeting;
  message.mac = mac_of_guest(token, hello.nonce, answer.nonce, message.greeting);
  return send_all(socket, bytes_of_message(message), deadline);
}

std::optional<Guest> Door::next(Clock::time_point deadline) {
  while (true) {
    const auto now = Clock::now();
    for (auto stranger = strangers_.begin(); stranger != strangers_.end();) {
      Greeting greeting;
      const Verdict verdict = now < stranger->deadline ? hear(*stranger, greeting) : Verdict::kIsOut;
      if (verdict == Verdict::kWaits) {
        ++stranger;
        continue;
      }
      UniqueFd socket = std::move(stranger->socket);
      stranger = strangers_.erase(stranger);
      if (verdict == Verdict::kIsGuest) return Guest{std::move(socket), greeting};
      ++turned_away_;
    }
    if (now >= deadline) return std::nullopt;
    std::vector<pollfd> fds{{listener_.get(), POLLIN, 0}};
    auto next_look = deadline;
    for (const Stranger& stranger : strangers_) {
      fds.push_back({stranger.socket.get(), POLLIN, 0});
      next_look = std::min(next_look, stranger.deadline);
    }
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_look - now).count();
    ::poll(fds.data(), fds.size(), static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000)));
    let_in();
  }
}

void Door::let_in() {
  while (auto socket = accept_from(listener_)) {
    if (strangers_.size() == kMaxStrangers) {  // the one that has had the longest time
      strangers_.erase(strangers_.begin());
      ++turned_away_;
    }
    strangers_.push_back({.socket = std::move(*socket), .deadline = Clock::now() + kPatience});
  }
}

Door::Verdict Door::hear(Stranger& stranger, Greeting& greeting) {
  while (true) {
    const std::size_t whole = stranger.is_answered ? sizeof(SignedGreeting) : sizeof(GuestHello);
    const std::size_t got = stranger.heard.size();
    stranger.heard.resize(whole);
    const ssize_t received = ::recv(stranger.socket.get(), stranger.heard.data() + got, whole - got, 0);
    const int error = errno;
    stranger.heard.resize(got + static_cast<std::size_t>(std::max<ssize_t>(received, 0)));
    if (received < 0 && (error == EAGAIN || error == EINTR)) return Verdict::kWaits;
    if (received <= 0) return Verdict::kIsOut;
    if (stranger.heard.size() < whole) continue;
    if (!stranger.is_answered) {
      if (!answer(stranger)) return Verdict::kIsOut;
      continue;
    }
    SignedGreeting message;
    std::memcpy(&message, stranger.heard.data(), sizeof(message));
    const Mac mac = mac_of_guest(token_, stranger.guest_nonce, stranger.host_nonce, message.greeting);
    if (!are_equal(message.mac, mac)) return Verdict::kIsOut;
    greeting = message.greeting;
    greeting.host[sizeof(greeting.host) - 1] = greeting.boot[sizeof(greeting.boot) - 1] = '\0';
    return Verdict::kIsGuest;
  }
}

bool Door::answer(Stranger& stranger) {
  GuestHello hello;
  std::memcpy(&hello, stranger.heard.data(), sizeof(hello));
  if (hello.magic != kMagic) return false;
  stranger.heard.clear();
  stranger.is_answered = true;
  stranger.guest_nonce = hello.nonce;
  stranger.host_nonce = random_nonce();
  const HostHello answer{.nonce = stranger.host_nonce,
                         .mac = mac_of_host(token_, stranger.guest_nonce, stranger.host_nonce)};
  // Into the empty buffer of a fresh socket: at once and as a whole.
  return ::send(stranger.socket.get(), &answer, sizeof(answer), MSG_NOSIGNAL) == static_cast<ssize_t>(sizeof(answer));
}

}  // namespace fsdp
