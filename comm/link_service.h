// The links of one rank to all others, and the thread that serves them.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "comm/link.h"

namespace fsdp {

// The connections to one peer.
struct PeerSockets {
  UniqueFd control, bulk;
};

class LinkService {
 public:
  // One pair for each rank, this rank's own empty. Throws std::system_error. `handler` outlives this.
  LinkService(std::vector<PeerSockets> sockets, FrameHandler& handler);
  // Drops what has not been sent.
  ~LinkService();

  void start();
  // Any thread; never waits.
  void send(int peer, Lane lane, OutgoingFrame frame);
  void send_to_all(const OutgoingFrame& frame);
  // Cuts all links, in the middle of whatever goes over them.
  void sever();
  void sever(int peer);
  // Sends what waits, tells the peers that it was the last and returns when they have seen that, or after `limit`.
  void finish(std::chrono::milliseconds limit);

 private:
  void loop();
  Link* link_of(int peer, Lane lane);

  FrameHandler& handler_;
  UniqueFd epoll_, wake_;
  std::vector<std::unique_ptr<Link>> links_;  // by rank, the control lane first; null for this rank itself
  std::atomic<bool> stopping_{false};
  std::thread thread_;
};

}  // namespace fsdp
