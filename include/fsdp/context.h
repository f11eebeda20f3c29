// Who this rank is, and the communicator it shares with the others.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <fsdp/communicator.h>

namespace fsdp {

struct InitOptions {
  std::string backend = "auto";  // auto (FSDP_BACKEND, else shm) or shm; thread ranks: see testing.h
  int rank = -1,
      world_size = -1;  // -1 = from the launcher's variables (torchrun's, Open MPI's, ...), else 0 and 1
  std::chrono::milliseconds timeout{600'000};  // longest wait for a peer; must be positive
};

// Cheap to copy; one per rank. The copies share one communicator, which ends with the last of them.
class Context {
 public:
  // Takes a communicator of any backend; local_rank and local_world_size are those of one host.
  Context(std::shared_ptr<Communicator> communicator, int local_rank, int local_world_size);

  int rank() const { return communicator_->rank(); }
  int world_size() const { return communicator_->world_size(); }
  int local_rank() const { return local_rank_; }
  int local_world_size() const { return local_world_size_; }
  const std::string& backend() const { return communicator_->backend(); }
  Communicator& communicator() const { return *communicator_; }
  bool is_main() const { return rank() == 0; }
  // Collective: the same mean over ranks on every rank, summed in rank order.
  double mean(double value) const;

 private:
  std::shared_ptr<Communicator> communicator_;
  int local_rank_, local_world_size_;
};

// Finds rank and world size (explicit options, else the first complete set of variables of torchrun, Open MPI, MVAPICH,
// PMI or a step of srun, else one rank), meets the other ranks and returns once all are there. They meet at the Unix
// socket that FSDP_RENDEZVOUS names, in a folder of mode 700, or at one that follows from the launcher's job, else from
// MASTER_ADDR and MASTER_PORT; one rank needs none. Throws InvalidArgument for a partial or impossible set of variables
// (prints what was found), for ranks on several hosts and for an unknown backend, and CommunicationError when a rank does
// not come within the timeout (names which).
Context init(const InitOptions& options = {});

}  // namespace fsdp
