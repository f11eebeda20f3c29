// What goes wrong where ranks meet, whichever way they do, in the words that every way shares.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <fsdp/error.h>

namespace fsdp {

// Where ranks meet, and how long each waits there.
struct MeetingTerms {
  std::string at;  // "10.0.0.7:29500"
  int world_size = 1;
  std::chrono::milliseconds timeout{};
};

// "pid 7", or "pid 7 on node3".
std::string process_text(int pid, const std::string& host);

// Rank 0 of `world_size` ranks has a guest that says it is `rank` of `said_world_size`.
InvalidArgument of_another_job(int world_size, int rank, int said_world_size, const std::string& process);
InvalidArgument two_are_one_rank(int rank, const std::string& first, const std::string& second);
// `found` and `remedy` end the sentence: "missing: rank 3{found}; {remedy}, or raise InitOptions::timeout".
CommunicationError ranks_are_missing(const MeetingTerms& terms, const std::vector<int>& missing,
                                     const std::string& found, const std::string& remedy);
CommunicationError ended_early(int rank, const std::string& process);
CommunicationError met_no_rank_0(const MeetingTerms& terms, int rank, const std::string& found,
                                 const std::string& remedy);
CommunicationError rank_0_ended(const MeetingTerms& terms, int rank);
CommunicationError rank_0_did_not_answer(const MeetingTerms& terms, int rank);
CommunicationError refused_by_rank_0(const std::string& reason);

}  // namespace fsdp
