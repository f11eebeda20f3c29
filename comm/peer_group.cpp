#include "comm/peer_group.h"

#include <algorithm>
#include <ctime>

#include <fmt/chrono.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <immintrin.h>
#include <sched.h>

#include <fsdp/error.h>

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

// A futex cannot wait for the end of a process as well, so a waiter looks for the dead this often.
constexpr std::chrono::milliseconds kLookInterval{50};
// A rank that has left may still be awaited for what another thread of ours is about to do: once every peer has left, the
// bell must have been silent this long before a wait is hopeless.
constexpr std::chrono::seconds kQuiet{1};
constexpr int kSpins = 300;  // some 10 us: less than a sleep and a wake-up cost

// With more ranks than cores a spinning rank holds up the one it waits for.
int spins_for(int world_size) {
  cpu_set_t cores;
  const bool known = ::sched_getaffinity(0, sizeof(cores), &cores) == 0;
  return known && world_size <= CPU_COUNT(&cores) ? kSpins : 0;
}

}  // namespace

PeerGroup::PeerGroup(PeerMemory& memory, int rank, std::chrono::milliseconds timeout)
    : memory_(memory),
      control_(memory.control()),
      rank_(rank),
      timeout_(timeout),
      spins_(spins_for(control_.world_size())) {}

void PeerGroup::meet(Operation operation) {
  enter({operation});
  const std::uint64_t meeting = ++meetings_;
  control_.arrive(rank_, meeting);
  memory_.announce_arrival(meeting);
  wait(control_.meeting_bell, {{operation}, meeting}, [&] { return control_.all_arrived(meeting); });
}

void PeerGroup::wait_until(const std::function<bool()>& ready, std::string_view what) {
  const Activity activity{Operation::kWaitUntil, what};
  enter(activity);
  wait(control_.doorbell, {activity}, ready);
}

void PeerGroup::wait(Bell& bell, const Wait& wait, const std::function<bool()>& ready) const {
  for (int i = 0; i < spins_; ++i) {
    if (ready()) return;
    _mm_pause();
  }
  const auto begin = Clock::now();
  auto last_ring = begin, next_look = begin;
  while (true) {
    Bell::Sleeper sleeper(bell);
    if (ready()) return;
    throw_if_aborted(wait.activity);
    const auto now = Clock::now();
    if (now >= next_look) {
      check(wait.activity);
      if (wait.fetch != nullptr) control_.slot(rank_).status.set_awaited(wait.fetch->awaited());
      next_look = now + kLookInterval;
    }
    throw_if_left(wait, now - last_ring >= kQuiet);
    if (now - begin >= timeout_) fail_for_timeout(wait);
    if (sleeper.sleep(std::min<Clock::duration>(next_look - now, begin + timeout_ - now))) last_ring = Clock::now();
  }
}

void PeerGroup::wait_for(const PeerMemory::Fetch& fetch, const Activity& activity) {
  RankStatus& status = control_.slot(rank_).status;
  wait(control_.doorbell, {.activity = activity, .fetch = &fetch}, [&] { return fetch.is_done(); });
  if (status.awaited() >= 0) status.set_awaited(-1);
  if (fetch.lost() < 0) return;
  check(activity);  // names one that died
  fail(activity, fetch.lost(),
       fmt::format("{} has left (its Context was destroyed) while rank {} reads its memory in {}; {}",
                   name_of_rank(fetch.lost()), rank_, describe(activity), remedy()));
}

void PeerGroup::enter(const Activity& activity) const {
  throw_if_aborted(activity);
  control_.slot(rank_).status.set_activity(activity);
}

void PeerGroup::throw_if_aborted(const Activity& activity) const {
  if (!control_.aborted()) return;
  throw CommunicationError(
      fmt::format("{} on rank {}: {}{}", describe(activity), rank_, control_.reason(), report_crash(control_.reason())),
      control_.culprit());
}

void PeerGroup::check(const Activity& activity) const {
  throw_if_aborted(activity);
  for (const int peer : memory_.ended()) {
    if (has_left(peer)) continue;
    fail(
        activity, peer,
        fmt::format("{} died, last in {} (seen by rank {} in {}): it was killed, perhaps for memory (see dmesg), ended "
                    "without destroying its Context, or lost its connection; {}",
                    name_of_rank(peer), last_of(peer), rank_, describe(activity), remedy()));
  }
}

void PeerGroup::throw_if_left(const Wait& wait, bool quiet) const {
  int left = 0, example = -1;
  for (int peer = 0; peer < world_size(); ++peer) {
    // In this order: a rank that came to the meeting and then left is not missed.
    if (peer == rank_ || !has_left(peer)) continue;
    ++left;
    if (control_.slot(peer).arrived.load() < wait.meeting) {
      fail(wait.activity, peer,
           fmt::format(
               "{} has left (its Context was destroyed) while rank {} waits for it in {}; every rank must make the "
               "same collective calls; {}",
               name_of_rank(peer), rank_, describe(wait.activity), remedy()));
    }
    example = peer;
  }
  if (wait.meeting == 0 && left > 0 && left == world_size() - 1 && quiet) {
    fail(wait.activity, example,
         fmt::format("{} has left (its Context was destroyed), as has every peer, while rank {} waits in {}; {}",
                     name_of_rank(example), rank_, describe(wait.activity), remedy()));
  }
}

bool PeerGroup::has_left(int rank) const { return control_.slot(rank).presence.load() == Presence::kLeft; }

bool PeerGroup::is_awaited(const Wait& wait, int rank) const {
  if (rank == rank_) return false;
  if (wait.fetch != nullptr) return wait.fetch->awaited() == rank;
  return wait.meeting == 0 || control_.slot(rank).arrived.load() < wait.meeting;
}

// "rank 2 (pid 7), last in reduce of layers.3, where it waits for rank 1 (pid 6), last in step 41"
std::string PeerGroup::state_of(int rank) const {
  std::string text = fmt::format("{}, last in {}{}", name_of_rank(rank), last_of(rank),
                                 has_left(rank) ? ", has left" : "");
  const int awaited = control_.slot(rank).status.awaited();
  if (awaited < 0 || awaited >= world_size() || awaited == rank_ || awaited == rank) return text;
  return text + fmt::format(", where it waits for {}, last in {}", name_of_rank(awaited), last_of(awaited));
}

void PeerGroup::fail_for_timeout(const Wait& wait) const {
  std::vector<std::string> missing;
  int culprit = -1;
  for (int peer = 0; peer < world_size(); ++peer) {
    if (!is_awaited(wait, peer)) continue;
    if (culprit < 0) culprit = peer;
    missing.push_back(state_of(peer));
  }
  const auto seconds = std::chrono::duration<double>(timeout_).count();
  const std::string_view absent = wait.meeting != 0       ? "did not come"
                                  : wait.fetch != nullptr ? "did not answer"
                                                          : "may be at fault";
  fail(wait.activity, culprit,
       fmt::format(
           "{} timed out on rank {} after {} s; {}: {}; a rank may be stuck, or make other calls than its peers; {}",
           describe(wait.activity), rank_, seconds, absent, fmt::join(missing, "; "), remedy()));
}

void PeerGroup::fail(const Activity& activity, int culprit, const std::string& reason) const {
  if (control_.abort(culprit, reason)) memory_.announce_abort();
  throw_if_aborted(activity);
  // The reason that came first is still being written, or its writer died over it: ours is as true.
  throw CommunicationError(fmt::format("{} on rank {}: {}{}", describe(activity), rank_, reason, report_crash(reason)),
                           culprit);
}

void PeerGroup::abort(std::string_view reason) noexcept {
  bool first = false;
  try {
    first = control_.abort(rank_, fmt::format("aborted by rank {}: {}", rank_, reason));
    if (control_.aborted()) report_crash(control_.reason());
  } catch (const std::exception&) {  // no memory for the text
    first = control_.abort(rank_, reason) || first;
  }
  if (first) memory_.announce_abort();
}

void PeerGroup::leave() noexcept {
  control_.slot(rank_).presence.store(Presence::kLeft);
  control_.meeting_bell.ring();
  control_.doorbell.ring();
  memory_.announce_leave();
}

// "reduce of layers.7 in step 41"
std::string PeerGroup::last_of(int rank) const {
  const RankStatus& status = control_.slot(rank).status;
  const std::int64_t step = status.progress().step;
  return step < 0 ? status.activity() : fmt::format("{} in step {}", status.activity(), step);
}

std::string PeerGroup::remedy() const {
  const std::int64_t saved = control_.slot(rank_).status.progress().saved_step;
  return saved < 0 ? "nothing further is exchanged; restart from the last checkpoint"
                   : fmt::format("nothing further is exchanged; restart from step {}, the last that was saved", saved);
}

const std::string& PeerGroup::report_crash(std::string_view reason) const {
  std::call_once(crash_flag_, [&] {
    if (crash_folder_.empty() || world_size() == 1) return;
    try {
      crash_note_ = fmt::format(" (this rank's last calls: {})",
                                write_crash_file(crash_folder_, rank_, crash_text(reason)).string());
    } catch (const std::system_error& error) {
      crash_note_ = fmt::format(" (this rank's last calls could not be kept: {}; name a folder with FSDP_CRASH_DIR)",
                                error.what());
    }
  });
  return crash_note_;
}

std::string PeerGroup::crash_text(std::string_view reason) const {
  const std::time_t now = std::time(nullptr);
  std::string text = fmt::format(
      "libfsdp crash file: {} of {}, {:%Y-%m-%dT%H:%M:%SZ}\nreason: {}\n\nranks, as this one "
      "knows them:\n",
      name_of_rank(rank_), world_size(), fmt::gmtime(now), reason);
  for (int rank = 0; rank < world_size(); ++rank) text += fmt::format("  {}\n", state_of(rank));
  text += fmt::format(
      "\nthe last {} calls, the oldest first; times in seconds, of the begin before this file's\n"
      "{:>10} {:>12} {:>12} {:>8}  {}\n",
      FlightRecorder::kEntries, "number", "begin", "took", "thread", "call");
  return text + recorder_.to_text(Clock::now());
}

std::string PeerGroup::name_of_rank(int rank) const {
  const RankSlot& slot = control_.slot(rank);
  return slot.host[0] == '\0' ? fmt::format("rank {} (pid {})", rank, slot.pid)
                              : fmt::format("rank {} (host {}, pid {})", rank, slot.host, slot.pid);
}

}  // namespace fsdp
