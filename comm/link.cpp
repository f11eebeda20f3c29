#include "comm/link.h"

#include <algorithm>
#include <array>
#include <cerrno>

#include <fmt/format.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>

#include <fsdp/error.h>

#include "comm/system_call.h"

namespace fsdp {
namespace {

// Of one link at a time, so that no other waits long.
constexpr std::size_t kTurnBytes = std::size_t{1} << 20;

std::span<const std::byte> payload_of(const OutgoingFrame& frame) {
  return frame.own.empty() ? frame.borrowed : std::span<const std::byte>(frame.own);
}

std::span<const std::byte> bytes_of_header(const OutgoingFrame& frame) {
  return std::as_bytes(std::span(&frame.header, 1));
}

iovec to_iovec(std::span<const std::byte> bytes) { return {const_cast<std::byte*>(bytes.data()), bytes.size()}; }

}  // namespace

Link::Link(UniqueFd socket, int peer, Lane lane, int epoll, std::uint64_t tag)
    : peer_(peer), lane_(lane), epoll_(epoll), tag_(tag), socket_(std::move(socket)) {
  epoll_event event{.events = EPOLLIN, .data = {.u64 = tag_}};
  check_call(::epoll_ctl(epoll_, EPOLL_CTL_ADD, socket_.get(), &event), "epoll_ctl");
}

void Link::send(OutgoingFrame frame) {
  frame.header.payload_bytes = static_cast<std::uint32_t>(payload_of(frame).size());
  const std::lock_guard lock(mutex_);
  if (!socket_ || finishes_) return;
  waiting_.push_back(std::move(frame));
  if (waiting_.size() == 1) send_some();
}

void Link::flush() {
  const std::lock_guard lock(mutex_);
  if (socket_) send_some();
}

bool Link::is_open() const {
  const std::lock_guard lock(mutex_);
  return static_cast<bool>(socket_);
}

void Link::finish() {
  const std::lock_guard lock(mutex_);
  if (!socket_ || finishes_) return;
  finishes_ = true;
  send_some();
}

void Link::sever() {
  const std::lock_guard lock(mutex_);
  if (!socket_) return;
  finishes_ = true;
  waiting_.clear();
  ::shutdown(socket_.get(), SHUT_RDWR);
}

void Link::close() {
  const std::lock_guard lock(mutex_);
  socket_ = UniqueFd();  // and with it its registration
  waiting_.clear();
}

void Link::send_some() {
  for (std::size_t turn = 0; !waiting_.empty() && turn < kTurnBytes;) {
    const OutgoingFrame& frame = waiting_.front();
    const auto header = bytes_of_header(frame), payload = payload_of(frame);
    std::array<iovec, 2> parts{to_iovec(header.subspan(std::min(sent_, header.size()))),
                               to_iovec(payload.subspan(sent_ - std::min(sent_, header.size())))};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t sent = ::sendmsg(socket_.get(), &message, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)) break;
    if (sent < 0) {
      waiting_.clear();  // the end that receive() then finds says that the peer is gone
      sent_ = 0;
      break;
    }
    turn += static_cast<std::size_t>(sent);
    sent_ += static_cast<std::size_t>(sent);
    if (sent_ < header.size() + payload.size()) continue;
    waiting_.pop_front();
    sent_ = 0;
  }
  if (waiting_.empty() && finishes_) ::shutdown(socket_.get(), SHUT_WR);
  watch(!waiting_.empty());
}

void Link::watch(bool writable) {
  if (writable == watches_writable_) return;
  epoll_event event{.events = EPOLLIN | (writable ? EPOLLOUT : 0U), .data = {.u64 = tag_}};
  ::epoll_ctl(epoll_, EPOLL_CTL_MOD, socket_.get(), &event);  // fails for a broken socket alone, which is seen as such
  watches_writable_ = writable;
}

void Link::receive(FrameHandler& handler) {
  try {
    for (std::size_t begin = got_, turn = 0; turn < kTurnBytes; begin = got_) {
      const Progress progress = receive_some(handler);
      if (progress == Progress::kNone) return;
      if (progress == Progress::kEnd) {
        close();
        // What a peer sent last is in the control lane, whichever lane's end is seen first.
        if (lane_ == Lane::kControl) handler.lose(peer_, "");
        return;
      }
      turn += got_ > begin ? got_ - begin : 1;
      take_if_whole(handler);
    }
  } catch (const std::exception& error) {  // what no rank sends, or no memory to take it
    close();
    handler.lose(peer_, error.what());
  }
}

Link::Progress Link::receive_some(FrameHandler& handler) {
  const int socket = socket_.get();  // closed by this thread alone
  ssize_t received = 0;
  if (got_ < sizeof(header_)) {
    received = ::recv(socket, reinterpret_cast<std::byte*>(&header_) + got_, sizeof(header_) - got_, MSG_DONTWAIT);
  } else if (lane_ == Lane::kBulk) {
    received = handler.receive_reply(socket, peer_, header_, got_ - sizeof(header_));
  } else {
    const std::size_t got = got_ - sizeof(header_);
    received = ::recv(socket, payload_.data() + got, payload_.size() - got, MSG_DONTWAIT);
  }
  if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return Progress::kNone;
  if (received <= 0) return Progress::kEnd;
  got_ += static_cast<std::size_t>(received);
  return Progress::kSome;
}

void Link::take_if_whole(FrameHandler& handler) {
  if (got_ < sizeof(header_)) return;
  if (got_ == sizeof(header_)) {
    if (const std::string_view fault = fault_of(header_, lane_); !fault.empty())
      throw InvalidArgument(fmt::format("it sent {}; start all ranks with the same build", fault), peer_);
    if (lane_ == Lane::kControl) payload_.resize(header_.payload_bytes);
  }
  if (got_ < sizeof(header_) + header_.payload_bytes) return;
  handler.take(peer_, header_, payload_);
  got_ = 0;
}

}  // namespace fsdp
