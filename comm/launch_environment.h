// Who am I, among how many, and where do we meet: read from what the caller and the launcher say. Pure.
#pragma once

#include <filesystem>
#include <map>
#include <string>

namespace fsdp {

using Variables = std::map<std::string, std::string>;

// The variables of this process.
Variables process_variables();

// One that is set to nothing counts as not set.
std::string value_or(const Variables& variables, const char* name, const char* fallback);

struct LaunchIdentity {
  int rank = 0, world_size = 1;
  int local_rank = 0, local_world_size = 1;  // among the ranks of this host; -1: the launcher does not say
  std::string launcher = {};                 // who said so: "torchrun", "Open MPI", ...; "" = nobody
  std::string job = {};                      // what no other start on this host has; "" = the launcher does not say
};

// The first complete of: the explicit pair (-1 = not given); the variables of torchrun, Open MPI, MVAPICH, PMI (MPICH,
// Intel MPI) and of a step of srun; a single rank. A job's variables that Slurm sets outside of a step are of a single
// process and say nothing. Throws InvalidArgument, with what was found and what to set, for a part of a set, or values
// that cannot be, above the first complete one.
LaunchIdentity identify(const Variables& variables, int rank, int world_size);

// Where the ranks of one host meet.
struct RendezvousSocket {
  std::filesystem::path path;     // empty: the variables name no place
  bool create_directory = false;  // the folder is ours to make
};

// FSDP_RENDEZVOUS if set; else a name under $TMPDIR/fsdp-<user>/ that no other job or attempt has: of the launcher's job,
// or of MASTER_ADDR and MASTER_PORT, and of the place that the program names, if it does.
RendezvousSocket rendezvous_socket(const Variables& variables, const LaunchIdentity& self,
                                   const std::string& init_method, unsigned user);

}  // namespace fsdp
