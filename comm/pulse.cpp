#include "comm/pulse.h"

#include <fstream>
#include <string>
#include <string_view>

namespace fsdp {

Pulses::Pulses(std::size_t peers, std::chrono::milliseconds silence, Clock::time_point now)
    : silence_(silence), pulses_(peers, Pulse{.last_heard = now}), last_tick_(now) {}

void Pulses::tick(Clock::time_point now) {
  if (now - last_tick_ > kShortestSilence) {
    for (Pulse& pulse : pulses_) pulse.last_heard = now;
  }
  last_tick_ = now;
}

bool Pulses::is_silent(int peer, Clock::time_point now) const {
  const Pulse& pulse = pulses_[static_cast<std::size_t>(peer)];
  return silence_.count() != 0 && !pulse.is_traced && now - pulse.last_heard >= silence_;
}

bool is_traced() {
  constexpr std::string_view kKey = "TracerPid:";
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with(kKey)) return line.find_first_of("123456789", kKey.size()) != std::string::npos;
  }
  return false;
}

}  // namespace fsdp
