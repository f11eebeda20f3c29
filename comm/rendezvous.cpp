#include "comm/rendezvous.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <optional>
#include <system_error>
#include <thread>

#include <fmt/format.h>
#include <poll.h>
#include <sys/syscall.h>

#include "comm/meeting_error.h"
#include "comm/unix_socket.h"

namespace fsdp {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::uint32_t kMagic = 0x46534450;  // a stranger's message is not taken for a hello
constexpr std::uint32_t kProtocol = 1;
constexpr std::chrono::milliseconds kRetryInterval{10};
constexpr char kWelcome = 'W', kRefusal = 'R';  // the first byte of rank 0's answer; a refusal's text follows

struct Hello {
  std::uint32_t magic = kMagic, protocol = kProtocol;
  std::int32_t rank = 0, world_size = 0, pid = 0;
};

UniqueFd own_process() {
  UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, ::getpid(), 0)));
  if (!process) throw std::system_error(errno, std::generic_category(), "pidfd_open (Linux 5.3 or newer is needed)");
  return process;
}

std::vector<int> raw(const std::vector<UniqueFd>& fds) {
  std::vector<int> numbers;
  for (const UniqueFd& fd : fds) numbers.push_back(fd.get());
  return numbers;
}

int milliseconds_until(Clock::time_point deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline - Clock::now()).count();
  return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1000));
}

// False if the other end is closed. The kernel bounds the descriptors under way; their receivers are taking them out.
bool send_patiently(const UniqueFd& link, std::string_view bytes, std::span<const int> fds) {
  Sent sent;
  while ((sent = send_message(link, bytes, fds)) == Sent::kTryAgain) std::this_thread::sleep_for(kRetryInterval);
  return sent == Sent::kYes;
}

MeetingTerms terms_of(const MeetingPlace& place) { return {place.socket.string(), place.world_size, place.timeout}; }

constexpr const char* kRemedy = "start every rank on this host with the same FSDP_RENDEZVOUS or MASTER_PORT";

// Rank 0's side: the guests that have said who they are, and the strangers that have not.
class Host {
 public:
  explicit Host(const MeetingPlace& place)
      : place_(place), door_(place.socket, place.create_directory), guests_(count()) {}

  // Returns when all are there; on any error those that are there learn of it.
  std::vector<UniqueFd> admit_all(Meeting& meeting) {
    const auto deadline = Clock::now() + place_.timeout;
    try {
      while (arrived_ < place_.world_size - 1) {
        if (Clock::now() >= deadline) throw ranks_are_missing(terms_of(place_), missing(), "", kRemedy);
        wait_for_news(deadline);
        while (auto connection = door_.accept()) strangers_.push_back(std::move(*connection));
        for (UniqueFd& stranger : strangers_) hear(stranger, meeting);
        std::erase_if(strangers_, [](const UniqueFd& fd) { return !fd; });
        for (int rank = 1; rank < place_.world_size; ++rank) throw_if_gone(rank, meeting);
      }
    } catch (const Error& error) {
      refuse_all(error.what());
      throw;
    }
    return std::move(guests_);
  }

 private:
  std::size_t count() const { return static_cast<std::size_t>(place_.world_size); }

  void wait_for_news(Clock::time_point deadline) {
    std::vector<pollfd> fds{{door_.get(), POLLIN, 0}};
    for (const UniqueFd& stranger : strangers_) fds.push_back({stranger.get(), POLLIN, 0});
    for (const UniqueFd& guest : guests_) fds.push_back({guest.get(), POLLIN, 0});  // poll ignores -1
    ::poll(fds.data(), fds.size(), milliseconds_until(deadline));
  }

  // Turns the stranger into a guest if it has said a proper hello; drops it if it never will.
  void hear(UniqueFd& stranger, Meeting& meeting) {
    std::optional<Message> message;
    try {
      if (!same_user(stranger)) throw std::system_error(EACCES, std::generic_category());
      message = receive_message(stranger);
    } catch (const std::system_error&) {
      stranger = UniqueFd();
      return;
    }
    if (!message) return;
    Hello hello;
    const bool proper = message->bytes.size() == sizeof(hello) && message->fds.size() == 1;
    if (proper) std::memcpy(&hello, message->bytes.data(), sizeof(hello));
    if (!proper || hello.magic != kMagic) {
      stranger = UniqueFd();
      return;
    }
    admit(hello, stranger, std::move(message->fds[0]), meeting);
  }

  void admit(const Hello& hello, UniqueFd& stranger, UniqueFd pidfd, Meeting& meeting) {
    const auto rank = static_cast<std::size_t>(hello.rank);
    const std::string process = process_text(hello.pid, "");
    const bool valid = hello.world_size == place_.world_size && hello.rank > 0 && rank < count();
    if (hello.protocol != kProtocol || !valid || guests_[rank]) {
      const InvalidArgument error =
          hello.protocol != kProtocol
              ? InvalidArgument(fmt::format("rendezvous: rank 0's build has protocol {}, that of {} has {}; start all "
                                            "ranks with the same build",
                                            kProtocol, process, hello.protocol))
          : valid ? two_are_one_rank(hello.rank, process_text(meeting.control->slot(hello.rank).pid, ""), process)
                  : of_another_job(place_.world_size, hello.rank, hello.world_size, process);
      send_message(stranger, kRefusal + std::string(error.what()), {});
      throw error;
    }
    meeting.control->slot(hello.rank).pid = hello.pid;
    meeting.processes[rank] = std::move(pidfd);
    guests_[rank] = std::move(stranger);
    ++arrived_;
  }

  void throw_if_gone(int rank, Meeting& meeting) {
    const UniqueFd& guest = guests_[static_cast<std::size_t>(rank)];
    if (!guest) return;
    try {
      receive_message(guest);
    } catch (const std::system_error&) {
      throw ended_early(rank, process_text(meeting.control->slot(rank).pid, ""));
    }
  }

  std::vector<int> missing() const {
    std::vector<int> ranks;
    for (int rank = 1; rank < place_.world_size; ++rank) {
      if (!guests_[static_cast<std::size_t>(rank)]) ranks.push_back(rank);
    }
    return ranks;
  }

  void refuse_all(const std::string& reason) {
    for (const UniqueFd& guest : guests_) {
      if (guest) send_message(guest, (kRefusal + reason).substr(0, kMaxMessageBytes), {});
    }
  }

  const MeetingPlace& place_;
  ListeningSocket door_;
  std::vector<UniqueFd> guests_;  // by rank
  std::vector<UniqueFd> strangers_;
  int arrived_ = 0;
};

Meeting host(const MeetingPlace& place) {
  const std::size_t bytes = ControlBlock::bytes_for(place.world_size);
  const UniqueFd control = make_memfd(bytes);
  Meeting meeting;
  meeting.control_memory = MappedMemory(control, bytes);
  meeting.control = &ControlBlock::create(meeting.control_memory.span(), place.world_size);
  meeting.control->slot(0).pid = ::getpid();
  meeting.processes.resize(static_cast<std::size_t>(place.world_size));
  meeting.processes[0] = own_process();
  if (place.world_size == 1) return meeting;  // nobody to let in
  meeting.links = Host(place).admit_all(meeting);
  std::vector<int> fds = raw(meeting.processes);
  fds.push_back(control.get());
  for (int rank = 1; rank < place.world_size; ++rank) {
    if (send_patiently(meeting.links[static_cast<std::size_t>(rank)], {&kWelcome, 1}, fds)) continue;
    throw ended_early(rank, process_text(meeting.control->slot(rank).pid, ""));
  }
  return meeting;
}

UniqueFd knock(const MeetingPlace& place, Clock::time_point deadline) {
  while (true) {
    if (auto link = connect_to(place.socket, place.create_directory)) {
      if (same_user(*link)) return std::move(*link);
      throw CommunicationError(
          fmt::format("rendezvous at {}: the listener belongs to another user", place.socket.string()), 0);
    }
    if (Clock::now() >= deadline) break;
    std::this_thread::sleep_for(kRetryInterval);
  }
  throw met_no_rank_0(terms_of(place), place.rank, "", kRemedy);
}

Message hear_answer(const UniqueFd& link, const MeetingPlace& place, Clock::time_point deadline) {
  while (Clock::now() < deadline) {
    pollfd fd{link.get(), POLLIN, 0};
    ::poll(&fd, 1, milliseconds_until(deadline));
    try {
      if (auto message = receive_message(link)) return std::move(*message);
    } catch (const std::system_error& error) {
      if (error.code() != std::errc::connection_reset) throw;
      throw rank_0_ended(terms_of(place), place.rank);
    }
  }
  throw rank_0_did_not_answer(terms_of(place), place.rank);
}

Meeting visit(const MeetingPlace& place) {
  // Rank 0 knows who is missing, so it is given the time to say so.
  const auto deadline = Clock::now() + place.timeout + std::chrono::seconds(2);
  Meeting meeting;
  meeting.links.push_back(knock(place, deadline));
  const UniqueFd& link = meeting.links[0];
  const Hello hello{.rank = place.rank, .world_size = place.world_size, .pid = ::getpid()};
  const UniqueFd process = own_process();
  const int fd = process.get();
  send_patiently(link, {reinterpret_cast<const char*>(&hello), sizeof(hello)},
                 {&fd, 1});  // if closed, so is the answer
  Message answer = hear_answer(link, place, deadline);
  if (answer.bytes[0] == kRefusal) throw refused_by_rank_0(answer.bytes.substr(1));
  if (answer.bytes[0] != kWelcome || answer.fds.size() != static_cast<std::size_t>(place.world_size) + 1) {
    throw CommunicationError(
        fmt::format("rendezvous at {}: rank 0's answer is of another version", place.socket.string()), 0);
  }
  meeting.control_memory = MappedMemory(answer.fds.back(), ControlBlock::bytes_for(place.world_size));
  answer.fds.pop_back();
  meeting.control = &ControlBlock::attach(meeting.control_memory.span());
  meeting.processes = std::move(answer.fds);
  return meeting;
}

}  // namespace

Meeting meet_at(const MeetingPlace& place) { return place.rank == 0 ? host(place) : visit(place); }

}  // namespace fsdp
