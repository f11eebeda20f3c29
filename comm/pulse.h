// Who is silent: when each peer was last heard of, as the thread that hears them keeps it. The time comes from the caller.
#pragma once

#include <chrono>
#include <vector>

namespace fsdp {

// Ranks tell each other so often that they are there.
inline constexpr std::chrono::seconds kBeatInterval{1};
// A healthy rank may miss a beat, on a machine with more to do than it has cores for; below this it would be taken for dead.
inline constexpr std::chrono::milliseconds kShortestSilence = 3 * kBeatInterval;

class Pulses {
 public:
  using Clock = std::chrono::steady_clock;

  // A peer that nothing is heard of for as long as `silence` is silent; 0 = nobody ever is.
  Pulses(std::size_t peers, std::chrono::milliseconds silence, Clock::time_point now);

  void hear(int peer, Clock::time_point now) { at(peer).last_heard = now; }
  // A debugger may stop it for any time.
  void set_traced(int peer, bool is_traced) { at(peer).is_traced = is_traced; }
  // To be called about once in kBeatInterval. Where that was missed for long, this process was stopped itself and has
  // heard nobody: all begin anew.
  void tick(Clock::time_point now);
  bool is_silent(int peer, Clock::time_point now) const;

 private:
  struct Pulse {
    Clock::time_point last_heard;
    bool is_traced = false;
  };
  Pulse& at(int peer) { return pulses_[static_cast<std::size_t>(peer)]; }

  const std::chrono::milliseconds silence_;
  std::vector<Pulse> pulses_;  // by rank
  Clock::time_point last_tick_;
};

// Whether a debugger has this process, as the kernel tells.
bool is_traced();

}  // namespace fsdp
