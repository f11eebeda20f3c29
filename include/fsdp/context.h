// Who this rank is, and the communicator it shares with the others.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include <fsdp/communicator.h>

namespace fsdp {

struct InitOptions {
  // auto | shm | tcp. auto: FSDP_BACKEND, else shm where all ranks are on one host and tcp where they are not. Thread
  // ranks: see testing.h.
  std::string backend = "auto";
  // Where ranks meet that do not meet on one host: "tcp://host:port" of rank 0, "file:///path" that all can reach, or
  // "env://": MASTER_ADDR and MASTER_PORT; "": FSDP_INIT_METHOD, else "env://".
  std::string init_method = {};
  int rank = -1,
      world_size = -1;  // -1 = from the launcher's variables (torchrun's, Open MPI's, ...), else 0 and 1
  std::chrono::milliseconds timeout{600'000};  // longest wait for a peer; must be positive. FSDP_TIMEOUT (seconds) wins
  // tcp: a rank that nothing is heard of for this long is dead, whoever waits for it; each tells the others once a second
  // that it is there. At least 3 s; 0 = never. A rank in a debugger is not missed. FSDP_SILENCE (seconds) wins.
  std::chrono::milliseconds silence{60'000};
};

// Cheap to copy; one per rank. The copies share one communicator, which ends with the last of them. Over tcp that end waits
// until no peer needs what this rank has staged, or has ended itself: for peers in a collective that this rank took part
// in, and at most for `timeout`; not at all once the group is aborted.
class Context {
 public:
  // Takes a communicator of any backend; local_rank and local_world_size are those of one host.
  Context(std::shared_ptr<Communicator> communicator, int local_rank, int local_world_size,
          std::string backend_reason = {});

  int rank() const { return communicator_->rank(); }
  int world_size() const { return communicator_->world_size(); }
  int local_rank() const { return local_rank_; }
  int local_world_size() const { return local_world_size_; }
  const std::string& backend() const { return communicator_->backend(); }
  // Why it is this one: "all 4 ranks are on this host (from torchrun)"; empty where nobody chose.
  const std::string& backend_reason() const { return backend_reason_; }
  Communicator& communicator() const { return *communicator_; }
  bool is_main() const { return rank() == 0; }
  // Collective: the same mean over ranks on every rank, summed in rank order.
  double mean(double value) const;

 private:
  std::shared_ptr<Communicator> communicator_;
  int local_rank_, local_world_size_;
  std::string backend_reason_;
};

// Finds rank and world size (explicit options, else the first complete set of variables of torchrun, Open MPI, MVAPICH,
// PMI or a step of srun, else one rank), chooses the backend, meets the other ranks and returns once all are there.
// One rank needs no place to meet. Ranks of one host meet at the Unix socket that FSDP_RENDEZVOUS names, in a folder of
// mode 700, or at one that follows from the launcher's job, else from MASTER_ADDR and MASTER_PORT. Ranks of several hosts
// meet at rank 0's address (init_method) and need a secret of their job, which no other user knows: FSDP_JOB_TOKEN (64
// hexadecimal digits) or FSDP_JOB_TOKEN_FILE (a private file with them); `fsdp run` and a meeting file bring their own.
// Throws InvalidArgument for a partial or impossible set of variables (prints what was found), an unknown backend, or a
// port that is taken (names the holder), and CommunicationError when a rank does not come within the timeout (names
// which).
Context init(const InitOptions& options = {});

}  // namespace fsdp
