// Ranks as real processes, forked from a test and never outliving it.
#pragma once

#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <sys/types.h>

namespace fsdp {

// A folder of mode 700 that goes with the object.
class PrivateFolder {
 public:
  PrivateFolder();
  ~PrivateFolder();
  PrivateFolder(const PrivateFolder&) = delete;
  PrivateFolder& operator=(const PrivateFolder&) = delete;
  const std::filesystem::path& path() const { return path_; }
  // Names of what lies in it.
  std::vector<std::string> entries() const;

 private:
  std::filesystem::path path_;
};

// Where the ranks of one job on this host meet, over either backend.
class JobPlace {
 public:
  explicit JobPlace(const std::filesystem::path& folder);
  // torchrun's variables, FSDP_BACKEND and what the backend needs.
  std::map<std::string, std::string> variables(const std::string& backend, int rank, int world_size) const;
  int port() const { return port_; }

 private:
  std::filesystem::path socket_;
  int port_;  // free when it was chosen
  std::string token_;
};

class RankProcesses {
 public:
  RankProcesses() = default;
  ~RankProcesses();  // kills by pid what still runs
  RankProcesses(const RankProcesses&) = delete;
  RankProcesses& operator=(const RankProcesses&) = delete;

  // Forks; the child sets `variables`, runs `body` and ends with what it returned, or the error's text, as its outcome.
  // REQUIRES no other thread in this process. Returns the child's number, counted from 0.
  int start(const std::map<std::string, std::string>& variables, const std::function<std::string()>& body);
  // torchrun's four variables and FSDP_RENDEZVOUS, for one host.
  int start_rank(int rank, int world_size, const std::filesystem::path& socket,
                 const std::function<std::string()>& body);

  pid_t pid(int child) const { return children_.at(static_cast<std::size_t>(child)).pid; }
  void kill(int child);  // SIGKILL
  // What the child returned, "error: " and the text of what it threw, or "killed". A child that takes longer than 20 s is
  // killed and gives "hung".
  std::string outcome(int child);

 private:
  struct Child {
    pid_t pid = -1;  // -1 once waited for
    int pipe = -1;
  };
  std::vector<Child> children_;
};

}  // namespace fsdp
