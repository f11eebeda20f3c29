// What the ranks of one job are told: torchrun's variables, so that a program which starts under torchrun starts here too, and
// the place where libfsdp's ranks meet.
#pragma once

#include <filesystem>
#include <map>
#include <string>

namespace fsdp {

struct JobEnvironment {
  int world_size = 1;
  int threads_per_rank = 1;  // for OpenMP
  int master_port = 0;
  std::string job_id;
  std::string token;                // the secret of ranks that meet over TCP
  std::string backend;              // "" = the program's own choice
  std::filesystem::path directory;  // private to the user; holds the rendezvous socket

  // The variables of one rank. OMP_NUM_THREADS is left out where the user has set it.
  std::map<std::string, std::string> variables(int rank, bool omp_num_threads_set) const;
};

// Picks a free port and a job id, and makes the directory (mode 0700) under $TMPDIR or /tmp. Throws InvalidArgument if that
// cannot hold it, or if its path is too long for a socket.
JobEnvironment make_job_environment(int world_size, const std::string& backend);

}  // namespace fsdp
