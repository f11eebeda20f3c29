// A rank is killed, stopped, or throws, at every named point of a training: the others end soon, each with a line that
// names it and what it did last, and no process is left. Points are the calls that the training makes of its
// communicator, by operation and label, and places of the user's own code; a run without a fault finds them.
//
// Ranks are forked from this process, which has loaded LibTorch and started no thread. FSDP_TEST_POINTS=all takes every
// point; else a share of them, which differs from one cell to the next.
#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>

#include <ATen/Parallel.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include "comm/launch_environment.h"
#include "comm/recording_communicator.h"
#include "comm/shm_communicator.h"
#include "comm/tcp_communicator.h"
#include "comm/tcp_rendezvous.h"
#include "tests/comm/rank_processes.h"
#include "tests/support/parity.h"

namespace fsdp::testing {
namespace {

using ::testing::AnyOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

constexpr int kVictim = 1;
constexpr auto kTimeout = 2s;

// Called at each point of a rank's training, with its name.
using AtPoint = std::function<void(const std::string& point)>;

// "wait_until of reduce of layers.1": without what differs from one step or rank to the next.
std::string name_of_point(const CommunicatorRecord& record) {
  const std::string label = record.label.substr(0, record.label.find(" ("));
  return label.empty() ? record.operation : record.operation + " of " + label;
}

std::shared_ptr<PeerCommunicator> connect() {
  const Variables variables = process_variables();
  const LaunchIdentity self = identify(variables, -1, -1);
  std::shared_ptr<PeerCommunicator> communicator;
  if (variables.at("FSDP_BACKEND") == "tcp") {
    communicator = make_tcp_communicator(tcp_place(variables, self, "", kTimeout, 0ms)).communicator;
  } else {
    const RendezvousSocket socket = rendezvous_socket(variables, self, "", ::geteuid());
    communicator = make_shm_communicator({socket.path, socket.create_directory, self.rank, self.world_size, kTimeout});
  }
  communicator->set_crash_folder(variables.at("FSDP_CRASH_DIR"));
  return communicator;
}

// Sharding, steps, a checkpoint and its resumption, evaluation, and the end of all.
std::string train(const std::filesystem::path& folder, const AtPoint& at_point) {
  at::set_num_threads(1);
  at_point("start");
  const std::shared_ptr<PeerCommunicator> connected = connect();
  const int rank = connected->rank(), world_size = connected->world_size();
  std::atomic<const char*> phase{"sharding"};
  {
    const Context context(
        std::make_shared<RecordingCommunicator>(connected, FaultPlan{},
                                                [&](int, const CommunicatorRecord& record) {
                                                  // Whether a rank has to wait differs from run to run.
                                                  if (record.operation != "wait_until")
                                                    at_point(phase.load() + (": " + name_of_point(record)));
                                                }),
        rank, world_size);
    at_point("rendezvous");
    at::manual_seed(5);
    const auto model = std::make_shared<StackModel>(3, 8);
    Engine engine = shard(context, model, {.units = units_named({"layers.0", "layers.1", "layers.2"})});
    Optimizer optimizer = engine.optimizer(AdamW{.lr = 1e-2});
    at_point("sharded");
    for (int step = 0; step < 3; ++step) {
      phase = step == 0 ? "first step" : "later step";
      const Batch batch = model->batch(4, static_cast<std::uint64_t>(10 * step + rank));
      const at::Tensor loss = model->loss(batch.input, batch.target);
      at_point("forward");
      loss.backward();
      at_point("backward");
      optimizer.step({.max_grad_norm = 1.0});
      at_point("step");
      phase = "saving";
      if (step == 1) engine.save(folder / "run");
    }
    phase = "resuming";
    engine.resume(folder / "run");
    at_point("resumed");
    phase = "consolidating";
    engine.consolidate(folder / "whole.safetensors");
    at_point("consolidated");
    {
      phase = "summoning";
      const at::NoGradGuard no_grad;
      const auto scope = engine.summon();
    }
    phase = "averaging";
    context.mean(1);
    at_point("before the end");
  }
  return "done";
}

enum class Fate { kKilled, kStopped, kThrows };

struct Cell {
  const char* backend;
  int world_size;
  Fate fate;
};

std::string name_of_cell(const Cell& cell) {
  constexpr const char* kFates[] = {"Killed", "Stopped", "Throws"};
  return kFates[static_cast<int>(cell.fate)] + std::string("At") + std::to_string(cell.world_size) +
         name_of_backend(cell.backend);
}
void PrintTo(const Cell& cell, std::ostream* out) { *out << name_of_cell(cell); }

void meet(Fate fate) {
  switch (fate) {
    case Fate::kKilled: ::raise(SIGKILL); return;
    case Fate::kStopped: ::raise(SIGSTOP); return;
    case Fate::kThrows: throw std::runtime_error("out of luck");
  }
}

class FailingTogetherTest : public ::testing::TestWithParam<Cell> {
 protected:
  struct Ranks {
    PrivateFolder folder;
    RankProcesses processes;  // child r is rank r
  };

  static void start(Ranks& ranks, const std::function<std::string(int rank)>& body) {
    const JobPlace job(ranks.folder.path());
    for (int rank = 0; rank < GetParam().world_size; ++rank) {
      auto variables = job.variables(GetParam().backend, rank, GetParam().world_size);
      variables["FSDP_CRASH_DIR"] = ranks.folder.path();
      ranks.processes.start(variables, [&body, rank] { return body(rank); });
    }
  }

  // Of the victim, in the order in which it first comes to them.
  static std::vector<std::string> find_points() {
    Ranks ranks;
    start(ranks, [&](int) {
      std::mutex mutex;
      std::set<std::string> seen;
      std::string points;
      train(ranks.folder.path(), [&](const std::string& point) {
        const std::lock_guard lock(mutex);
        if (seen.insert(point).second) points += point + "\n";
      });
      return points;
    });
    std::istringstream lines(ranks.processes.outcome(kVictim));
    std::vector<std::string> points;
    for (std::string line; std::getline(lines, line);) points.push_back(line);
    return points;
  }

  // One that failed after the meeting has written its last calls down.
  static void expect_crash_file(const Ranks& ranks, int rank, const std::string& text) {
    if (text.find("rendezvous") != std::string::npos || text.find("refused by rank 0") != std::string::npos) return;
    std::ifstream file(ranks.folder.path() / ("crash-r" + std::to_string(rank) + ".txt"));
    std::string line, last;
    while (std::getline(file, line)) last = line;
    EXPECT_THAT(last, ContainsRegex("^ *[0-9]+ +-[0-9.]+ +(not over|[0-9.]+) +[0-9]+  [a-z]")) << text;
  }

  static void expect_failure(const std::string& text, const std::string& victim) {
    const std::string missing = "missing: rank 1";
    switch (GetParam().fate) {
      case Fate::kKilled: EXPECT_THAT(text, AnyOf(HasSubstr(victim + " died, last in "), HasSubstr(missing))); return;
      case Fate::kStopped:
        EXPECT_THAT(text, AnyOf(HasSubstr(victim + ", last in "), HasSubstr(missing)));
        EXPECT_THAT(text, AnyOf(HasSubstr(" timed out on rank "), HasSubstr(missing)));
        return;
      case Fate::kThrows: EXPECT_THAT(text, AnyOf(HasSubstr("aborted by rank 1: "), HasSubstr(missing))); return;
    }
  }

  // `may_end_well`: the others need nothing of the victim from there on. False if the victim did not come to the point:
  // which of the engine's threads makes a call, and so when, differs between runs.
  static bool run(const std::string& point, bool may_end_well) {
    SCOPED_TRACE(point);
    Ranks ranks;
    const auto begin = std::chrono::steady_clock::now();
    start(ranks, [&](int rank) {
      std::atomic<bool> met{false};
      return train(ranks.folder.path(), [&](const std::string& here) {
        if (rank == kVictim && here == point && !met.exchange(true)) meet(GetParam().fate);
      });
    });
    const std::string victim = "rank 1 (pid " + std::to_string(ranks.processes.pid(kVictim)) + ")";
    std::vector<std::string> texts;
    for (int rank = 0; rank < GetParam().world_size; ++rank) {
      if (rank == kVictim) continue;
      texts.push_back(ranks.processes.outcome(rank));
      if (texts.back() != "done") expect_crash_file(ranks, rank, texts.back());
    }
    const auto end = std::chrono::steady_clock::now();
    if (GetParam().fate == Fate::kStopped) ranks.processes.kill(kVictim);
    const std::string own = ranks.processes.outcome(kVictim);
    if (own == "done") return false;
    for (const std::string& text : texts) {
      if (!may_end_well || text != "done") expect_failure(text, victim);
    }
    // A wait that began before the victim's end may be followed by one more.
    const auto limit = GetParam().fate == Fate::kStopped ? 2 * kTimeout + 2s : point == "start" ? kTimeout + 3s : 3s;
    EXPECT_LT(end - begin, limit);
    EXPECT_THAT(own,
                GetParam().fate == Fate::kThrows ? ContainsRegex("error: .*out of luck") : ContainsRegex("killed"));
    return true;
  }
};

TEST_P(FailingTogetherTest, AtEveryPoint) {
  const std::vector<std::string> points = find_points();
  ASSERT_GE(points.size(), 30U);
  const char* share = std::getenv("FSDP_TEST_POINTS");
  const bool all = share != nullptr && std::string(share) == "all";
  const std::size_t stride = all ? 1 : GetParam().fate == Fate::kStopped ? 12 : 3;
  // The last collective: who has come out of it needs nobody any more.
  const auto last = std::find(points.begin(), points.end(), "averaging: all_reduce");
  ASSERT_NE(last, points.end());
  const std::size_t first = std::hash<std::string>{}(name_of_cell(GetParam())) % stride;
  for (std::size_t i = first; i < points.size(); i += stride) {
    std::cout << "point " << i + 1 << " of " << points.size() << ": " << points[i] << std::endl;
    bool came = false;
    for (int attempt = 0; attempt < 5 && !came; ++attempt)
      came = run(points[i], i >= static_cast<std::size_t>(last - points.begin()));
    EXPECT_TRUE(came) << points[i];
  }
}

INSTANTIATE_TEST_SUITE_P(Grid, FailingTogetherTest,
                         ::testing::Values(Cell{"shm", 2, Fate::kKilled}, Cell{"shm", 4, Fate::kKilled},
                                           Cell{"tcp", 2, Fate::kKilled}, Cell{"tcp", 4, Fate::kKilled},
                                           Cell{"shm", 2, Fate::kThrows}, Cell{"shm", 4, Fate::kThrows},
                                           Cell{"tcp", 2, Fate::kThrows}, Cell{"tcp", 4, Fate::kThrows},
                                           Cell{"shm", 2, Fate::kStopped}, Cell{"shm", 4, Fate::kStopped},
                                           Cell{"tcp", 2, Fate::kStopped}, Cell{"tcp", 4, Fate::kStopped}),
                         [](const auto& tested) { return name_of_cell(tested.param); });

}  // namespace
}  // namespace fsdp::testing
