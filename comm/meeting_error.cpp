#include "comm/meeting_error.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

namespace fsdp {
namespace {

double seconds_of(std::chrono::milliseconds time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

std::string process_text(int pid, const std::string& host) {
  return host.empty() ? fmt::format("pid {}", pid) : fmt::format("pid {} on {}", pid, host);
}

InvalidArgument of_another_job(int world_size, int rank, int said_world_size, const std::string& process) {
  return InvalidArgument(fmt::format("rendezvous: expected world size {} and a rank in [1, {}), as rank 0 has it, got "
                                     "world size {} and rank {} from {}; start all ranks with the same build and the "
                                     "same WORLD_SIZE",
                                     world_size, world_size, said_world_size, rank, process),
                         rank);
}

InvalidArgument two_are_one_rank(int rank, const std::string& first, const std::string& second) {
  return InvalidArgument(fmt::format("rendezvous: two processes say that they are rank {}: {} and {}; give each its "
                                     "own RANK",
                                     rank, first, second),
                         rank);
}

CommunicationError ranks_are_missing(const MeetingTerms& terms, const std::vector<int>& missing,
                                     const std::string& found, const std::string& remedy) {
  return CommunicationError(
      fmt::format("rendezvous at {}: {} of {} ranks came within {} s, missing: rank {}{}; {}, or raise "
                  "InitOptions::timeout",
                  terms.at, terms.world_size - static_cast<int>(missing.size()), terms.world_size,
                  seconds_of(terms.timeout), fmt::join(missing, ", "), found, remedy),
      missing.front());
}

CommunicationError ended_early(int rank, const std::string& process) {
  return CommunicationError(
      fmt::format("rendezvous: rank {} ({}) ended before all ranks were there; see its own output", rank, process),
      rank);
}

CommunicationError met_no_rank_0(const MeetingTerms& terms, int rank, const std::string& found,
                                 const std::string& remedy) {
  return CommunicationError(fmt::format("rendezvous at {}: rank {} met no rank 0 within {} s{}; {}, or raise "
                                        "InitOptions::timeout",
                                        terms.at, rank, seconds_of(terms.timeout), found, remedy),
                            0);
}

CommunicationError rank_0_ended(const MeetingTerms& terms, int rank) {
  return CommunicationError(
      fmt::format("rendezvous at {}: rank 0 ended while rank {} waited for the others; see rank 0's own output",
                  terms.at, rank),
      0);
}

CommunicationError rank_0_did_not_answer(const MeetingTerms& terms, int rank) {
  return CommunicationError(
      fmt::format("rendezvous at {}: rank 0 did not answer rank {} within {} s; another rank may be missing", terms.at,
                  rank, seconds_of(terms.timeout)),
      0);
}

CommunicationError refused_by_rank_0(const std::string& reason) {
  return CommunicationError("refused by rank 0: " + reason, 0);
}

}  // namespace fsdp
