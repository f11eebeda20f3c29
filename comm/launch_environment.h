// Who am I, among how many, and where do we meet: read from what the caller and the launcher say. Pure.
#pragma once

#include <filesystem>
#include <map>
#include <string>

namespace fsdp {

using Variables = std::map<std::string, std::string>;

// The variables of this process.
Variables process_variables();

struct LaunchIdentity {
  int rank = 0, world_size = 1;
  int local_rank = 0, local_world_size = 1;  // among the ranks of this host
};

// The first complete of: the explicit pair (-1 = not given), RANK/WORLD_SIZE/LOCAL_RANK/LOCAL_WORLD_SIZE, a single rank.
// Throws InvalidArgument, with what was found and what to set, for a part of a set or values that cannot be.
LaunchIdentity identify(const Variables& variables, int rank, int world_size);

// Where the ranks of one host meet.
struct RendezvousSocket {
  std::filesystem::path path;     // empty: the variables name no place
  bool create_directory = false;  // the folder is ours to make
};

// FSDP_RENDEZVOUS if set; else, of MASTER_PORT and what torchrun says of the job, a name under $TMPDIR/fsdp-<user>/ that
// no other job or attempt has.
RendezvousSocket rendezvous_socket(const Variables& variables, unsigned user);

}  // namespace fsdp
