// One connection between two ranks: whole frames out of any thread, and in on the thread that serves it.
#pragma once

#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <string_view>
#include <vector>

#include "comm/frame.h"
#include "comm/unique_fd.h"

namespace fsdp {

struct OutgoingFrame {
  FrameHeader header;
  std::vector<std::byte> own = {};           // the payload, or
  std::span<const std::byte> borrowed = {};  // bytes that stay as they are until they are sent,
  std::shared_ptr<const void> keep = {};     // and what keeps them
};

// What becomes of the frames that come in. Called by the serving thread.
class FrameHandler {
 public:
  virtual ~FrameHandler() = default;
  // Puts the next bytes of a reply's payload, of which `got` are there, in their place: recv(2)'s result.
  virtual ssize_t receive_reply(int socket, int peer, const FrameHeader& header, std::size_t got) = 0;
  // Throws InvalidArgument for what no rank of this program sends.
  virtual void take(int peer, const FrameHeader& header, std::span<const std::byte> payload) = 0;
  // Nothing comes from this peer any more. `why` is empty where it closed the connection.
  virtual void lose(int peer, std::string_view why) = 0;
  // About once a second, after all that has come by then.
  virtual void tick() = 0;
};

class Link {
 public:
  // Registers the socket for reading with `epoll`, under `tag`. Throws std::system_error.
  Link(UniqueFd socket, int peer, Lane lane, int epoll, std::uint64_t tag);

  int peer() const { return peer_; }
  Lane lane() const { return lane_; }

  // Any thread; never waits. What the socket does not take is sent by flush(). Dropped once the link is closed.
  void send(OutgoingFrame frame);
  // No frame goes out after those that wait; the peer sees the end.
  void finish();
  void sever();  // nothing goes in or out any more
  bool is_open() const;

  // The serving thread's: goes on with what waits; takes what has come, not all at once where it is much.
  void flush();
  void receive(FrameHandler& handler);
  void close();

 private:
  enum class Progress { kNone, kSome, kEnd };

  void send_some();  // under mutex_
  void watch(bool writable);
  Progress receive_some(FrameHandler& handler);
  void take_if_whole(FrameHandler& handler);

  const int peer_;
  const Lane lane_;
  const int epoll_;
  const std::uint64_t tag_;

  mutable std::mutex mutex_;
  UniqueFd socket_;
  std::deque<OutgoingFrame> waiting_;
  std::size_t sent_ = 0;  // of the first that waits, its header included
  bool watches_writable_ = false, finishes_ = false;

  FrameHeader header_;
  std::size_t got_ = 0;  // of the header and payload that come in
  std::vector<std::byte> payload_;
};

}  // namespace fsdp
