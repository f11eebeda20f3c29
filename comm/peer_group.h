// One rank's view of the group over a control block: meeting the others, waiting for them, and failing together.
#pragma once

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <string_view>

#include "comm/flight_recorder.h"
#include "comm/peer_memory.h"

namespace fsdp {

class PeerGroup {
 public:
  // Borrows `memory`.
  PeerGroup(PeerMemory& memory, int rank, std::chrono::milliseconds timeout);

  int rank() const { return rank_; }
  int world_size() const { return control_.world_size(); }
  std::chrono::milliseconds timeout() const { return timeout_; }
  ControlBlock& control() const { return control_; }

  // `rank` has come to a meeting that `other` has not. Any thread.
  bool awaits(int rank, int other) const {
    return control_.slot(rank).arrived.load() > control_.slot(other).arrived.load();
  }
  // The number of the coming meeting; it picks the half of slots and staging, see NOTE [Two halves].
  std::uint64_t next_meeting() const { return meetings_ + 1; }
  // Returns when every rank has come to this rank's next meeting. One thread at a time.
  void meet(Operation operation);
  // Any thread.
  void wait_until(const std::function<bool()>& ready, std::string_view what);

  // Any thread. Returns when all of it is there.
  void wait_for(const PeerMemory::Fetch& fetch, const Activity& activity);

  // What this rank begins to do, for the others' messages. Throws if the group is aborted.
  void enter(const Activity& activity) const;
  void throw_if_aborted(const Activity& activity) const;
  void report_progress(const Progress& progress) const { control_.slot(rank_).status.set_progress(progress); }
  // Throws if the group is aborted or a peer's process has ended without leaving.
  void check(const Activity& activity) const;
  void abort(std::string_view reason) noexcept;
  // Tells the peers that this rank does nothing any more; who waits for it then gets an error.
  void leave() noexcept;

  FlightRecorder& recorder() { return recorder_; }
  // Where this rank writes its crash file once the group has failed; "" = nowhere. Before the first call of the rank.
  void set_crash_folder(const std::filesystem::path& folder) { crash_folder_ = folder; }

 private:
  // `meeting` is what is waited for, or 0 for a wait_until.
  struct Wait {
    Activity activity;
    std::uint64_t meeting = 0;
    const PeerMemory::Fetch* fetch = nullptr;
  };

  void wait(Bell& bell, const Wait& wait, const std::function<bool()>& ready) const;
  void throw_if_left(const Wait& wait, bool quiet) const;
  bool has_left(int rank) const;
  // Aborts the group for `reason` and throws the first reason there was.
  [[noreturn]] void fail(const Activity& activity, int culprit, const std::string& reason) const;
  [[noreturn]] void fail_for_timeout(const Wait& wait) const;
  std::string name_of_rank(int rank) const;
  std::string last_of(int rank) const;
  std::string state_of(int rank) const;
  bool is_awaited(const Wait& wait, int rank) const;
  std::string remedy() const;
  // Writes the crash file, if that has not been done. Gives what there is to say of it, as the end of an error's text.
  const std::string& report_crash(std::string_view reason) const;
  std::string crash_text(std::string_view reason) const;

  PeerMemory& memory_;
  ControlBlock& control_;
  const int rank_;
  const std::chrono::milliseconds timeout_;
  const int spins_;
  std::uint64_t meetings_ = 0;

  FlightRecorder recorder_;
  std::filesystem::path crash_folder_;
  mutable std::once_flag crash_flag_;
  mutable std::string crash_note_;
};

}  // namespace fsdp
