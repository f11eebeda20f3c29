#include "comm/link_service.h"

#include <algorithm>
#include <array>

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>

#include "comm/pulse.h"
#include "comm/system_call.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint64_t kWakeTag = ~std::uint64_t{0};

UniqueFd require_fd(int fd, const char* call) { return UniqueFd(check_call(fd, call)); }

}  // namespace

LinkService::LinkService(std::vector<PeerSockets> sockets, FrameHandler& handler)
    : handler_(handler),
      epoll_(require_fd(::epoll_create1(EPOLL_CLOEXEC), "epoll_create1")),
      wake_(require_fd(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd")) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = kWakeTag}};
  check_call(::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event), "epoll_ctl");
  for (std::size_t rank = 0; rank < sockets.size(); ++rank) {
    for (const Lane lane : {Lane::kControl, Lane::kBulk}) {
      UniqueFd& socket = lane == Lane::kControl ? sockets[rank].control : sockets[rank].bulk;
      links_.push_back(
          socket ? std::make_unique<Link>(std::move(socket), static_cast<int>(rank), lane, epoll_.get(), links_.size())
                 : nullptr);
    }
  }
}

LinkService::~LinkService() {
  stopping_ = true;
  ::eventfd_write(wake_.get(), 1);
  if (thread_.joinable()) thread_.join();
}

void LinkService::start() {
  thread_ = std::thread([this] { loop(); });
}

Link* LinkService::link_of(int peer, Lane lane) {
  return links_[2 * static_cast<std::size_t>(peer) + static_cast<std::size_t>(lane)].get();
}

void LinkService::send(int peer, Lane lane, OutgoingFrame frame) { link_of(peer, lane)->send(std::move(frame)); }

void LinkService::send_to_all(const OutgoingFrame& frame) {
  for (const auto& link : links_) {
    if (link != nullptr && link->lane() == Lane::kControl) link->send(frame);
  }
}

void LinkService::sever() {
  for (const auto& link : links_) {
    if (link != nullptr) link->sever();
  }
}

void LinkService::sever(int peer) {
  for (const Lane lane : {Lane::kControl, Lane::kBulk}) {
    if (Link* link = link_of(peer, lane)) link->sever();
  }
}

void LinkService::finish(std::chrono::milliseconds limit) {
  for (const auto& link : links_) {
    if (link != nullptr) link->finish();
  }
  // Closing a connection with something unread in it would take from the peer what it has not read yet. The peer closes its
  // end once it has, so this waits for a thread of the peer that is always at hand.
  const auto end = Clock::now() + limit;
  const auto is_over = [&] {
    return std::none_of(links_.begin(), links_.end(),
                        [](const auto& link) { return link != nullptr && link->is_open(); });
  };
  while (!is_over() && Clock::now() < end) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void LinkService::loop() {
  ::prctl(PR_SET_NAME, "fsdp-links");
  std::array<epoll_event, 64> events;
  auto next_tick = Clock::now() + kBeatInterval;
  while (!stopping_) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next_tick - Clock::now()).count();
    const int count = ::epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                   static_cast<int>(std::max<std::int64_t>(left, 0)));
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<std::size_t>(i)];
      if (event.data.u64 == kWakeTag) continue;
      Link& link = *links_[event.data.u64];
      if ((event.events & EPOLLOUT) != 0) link.flush();
      if ((event.events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 && link.is_open()) link.receive(handler_);
    }
    if (Clock::now() < next_tick) continue;
    handler_.tick();
    next_tick = Clock::now() + kBeatInterval;
  }
}

}  // namespace fsdp
