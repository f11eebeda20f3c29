// The `fsdp` program. Exit codes: 0 good, 2 usage, 1 what was asked about is bad, or the launcher itself failed; `run` else
// gives the failed rank's own.
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <fsdp/error.h>

#include "cli/bench_comm.h"
#include "cli/doctor.h"
#include "cli/run.h"

namespace {

constexpr int kUsageError = 2;
constexpr int kMaxRanks = 1024;

int report(const std::string& text, int code) {
  std::fprintf(stderr, "%s\n", text.c_str());
  return code;
}

int parse_ranks(const std::string& text) {
  const bool digits = !text.empty() && text.size() <= 4 && text.find_first_not_of("0123456789") == std::string::npos;
  const int ranks = digits ? std::stoi(text) : 0;
  if (ranks < 1 || ranks > kMaxRanks) {
    throw fsdp::InvalidArgument("-n " + text + ": expected a number of ranks from 1 to " + std::to_string(kMaxRanks) +
                                "; e.g. -n 4");
  }
  return ranks;
}

// What the command line says, before it is judged.
struct Arguments {
  std::string ranks, backend;
  std::vector<std::string> command;
  fsdp::BenchOptions bench;
  fsdp::DoctorOptions doctor;
  bool json = false, strict = false, examines_ranks = false;
};

const std::vector<std::string> kBackends{"auto", "shm", "tcp"};

void add_run(CLI::App& app, Arguments& arguments) {
  auto* run = app.add_subcommand("run", "Start N ranks of a program on this host: fsdp run -n N -- program args...");
  run->add_option("-n,--ranks", arguments.ranks, "Number of ranks")->required()->type_name("N");
  run->add_option("--backend", arguments.backend, "How ranks share bytes (FSDP_BACKEND): auto, shm or tcp")
      ->check(CLI::IsMember(kBackends));
  run->add_flag("--doctor", arguments.examines_ranks,
                "In place of a program: fsdp doctor on every rank, and what differs");
  run->footer(
      "Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID,\n"
      "OMP_NUM_THREADS (cores / N, unless set), FSDP_RENDEZVOUS and FSDP_JOB_TOKEN; its stdin is /dev/null. The first "
      "rank that fails "
      "ends\n"
      "the job, and its exit code (128 + n for signal n) is that of fsdp run.");
}

void add_bench(CLI::App& app, Arguments& arguments) {
  auto* bench = app.add_subcommand("bench", "Measure this machine: fsdp bench comm");
  auto* comm = bench->add_subcommand("comm", "How fast ranks exchange bytes, in the columns of nccl-tests");
  bench->require_subcommand(1);
  comm->add_option("-n,--ranks", arguments.ranks, "Start this many ranks here; without it, be one of a launcher's")
      ->type_name("N");
  comm->add_option("--backend", arguments.backend, "How ranks share bytes (FSDP_BACKEND): auto, shm or tcp")
      ->check(CLI::IsMember(kBackends));
  fsdp::BenchOptions& options = arguments.bench;
  comm->add_option("-b,--begin", options.begin, "First size in bytes, e.g. 8 or 64K")
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  comm->add_option("-e,--end", options.end, "Last size, e.g. 1G")
      ->transform(CLI::AsSizeValue(false))
      ->capture_default_str();
  comm->add_option("-f,--factor", options.factor, "From one size to the next")->capture_default_str();
  comm->add_option("-i,--iterations", options.iterations, "Calls of each size; 0 = as many as take 0.2 s")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  comm->add_option("--operations", options.operations, "Only these")
      ->delimiter(',')
      ->check(CLI::IsMember(
          std::vector<std::string>(std::begin(fsdp::kBenchOperations), std::end(fsdp::kBenchOperations))));
  comm->add_flag("--json", options.json, "One JSON document in place of the table");
}

void add_doctor(CLI::App& app, Arguments& arguments) {
  auto* doctor = app.add_subcommand("doctor", "Look for what would go wrong on this machine, and say what to do");
  doctor->add_option("-n,--ranks", arguments.doctor.ranks, "Ranks that are to run here")
      ->check(CLI::Range(1, kMaxRanks))
      ->capture_default_str();
  doctor->add_option("--folder", arguments.doctor.folder, "Where checkpoints will be written")->capture_default_str();
  doctor->add_flag("--json", arguments.json, "A JSON array in place of the lines");
  doctor->add_flag("--as-rank", arguments.examines_ranks,
                   "As one of a launcher's ranks: rank 0 prints, and what differs");
  doctor->add_flag("--strict", arguments.strict, "A warning is a failure, too");
  doctor->footer("Exit code 0: nothing fails; 1: something does (with --strict: or warns); 2: a wrong command line.");
}

// Parses what stands before "--". Throws CLI::ParseError, also for --help and --version.
void parse(CLI::App& app, std::vector<std::string> words, Arguments& arguments) {
  app.set_version_flag("--version", "fsdp " FSDP_VERSION " (LibTorch " FSDP_LIBTORCH_VERSION ")");
  app.set_help_flag("-h,--help", "Show this text");
  add_run(app, arguments);
  add_bench(app, arguments);
  add_doctor(app, arguments);
  std::reverse(words.begin(), words.end());  // CLI11 takes a vector from its end
  app.parse(words);
}

// The exit code of a subcommand, whose errors are one line each.
int guarded(const std::string& subcommand, const std::function<int()>& body) {
  try {
    return body();
  } catch (const fsdp::InvalidArgument& error) {
    return report("fsdp " + subcommand + ": " + error.what(), kUsageError);
  } catch (const std::exception& error) {
    return report("fsdp " + subcommand + ": " + error.what(), 1);
  }
}

std::string own_path() { return std::filesystem::read_symlink("/proc/self/exe"); }

int run(const Arguments& arguments) {
  if (arguments.examines_ranks) {
    return fsdp::run_job({.ranks = parse_ranks(arguments.ranks),
                          .backend = arguments.backend,
                          .command = {own_path(), "doctor", "--as-rank", "--ranks", arguments.ranks},
                          .prefixes = false});
  }
  if (arguments.command.empty())
    throw fsdp::InvalidArgument("no program to start; name it after --, e.g. fsdp run -n 2 -- ./train");
  return fsdp::run_job(
      {.ranks = parse_ranks(arguments.ranks), .backend = arguments.backend, .command = arguments.command});
}

// With -n this program starts itself without it, as the ranks.
int bench(const Arguments& arguments, const std::vector<std::string>& words) {
  if (arguments.ranks.empty()) {
    const std::string backend = arguments.backend.empty() ? "auto" : arguments.backend;
    return fsdp::bench_comm(fsdp::init({.backend = backend}), arguments.bench) == 0 ? 0 : 1;
  }
  std::vector<std::string> command{own_path()};
  for (std::size_t i = 0; i < words.size(); ++i) {
    const bool is_long = words[i].starts_with("--ranks"), is_short = words[i].starts_with("-n");
    if (!is_long && !is_short)
      command.push_back(words[i]);
    else if (words[i] == "-n" || words[i] == "--ranks")
      ++i;  // and the number
  }
  return fsdp::run_job({.ranks = parse_ranks(arguments.ranks), .backend = "", .command = command, .prefixes = false});
}

int doctor(const Arguments& arguments) {
  const std::vector<fsdp::Finding> findings = arguments.examines_ranks
                                                  ? fsdp::examine_together(fsdp::init(), arguments.doctor)
                                                  : fsdp::examine(arguments.doctor);
  if (findings.empty()) return 0;  // another rank than 0
  if (arguments.json) {
    std::printf("%s\n", fsdp::to_json(findings).c_str());
  } else {
    for (const fsdp::Finding& finding : findings) std::printf("%s\n", fsdp::to_text(finding).c_str());
  }
  return fsdp::worst_of(findings) >= (arguments.strict ? fsdp::Verdict::kWarn : fsdp::Verdict::kFail) ? 1 : 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> all(argv + 1, argv + argc);
  const auto separator = std::find(all.begin(), all.end(), "--");
  Arguments arguments;
  CLI::App app("fsdp: fully sharded data-parallel training for LibTorch", "fsdp");
  try {
    parse(app, {all.begin(), separator}, arguments);
  } catch (const CLI::Success& request) {
    return app.exit(request);
  } catch (const CLI::ExtrasError& error) {
    return report(std::string("fsdp: ") + error.what() + "; see fsdp --help (a program and its arguments go after --)",
                  kUsageError);
  } catch (const CLI::ParseError& error) {
    return report(std::string("fsdp: ") + error.what() + "; see fsdp --help", kUsageError);
  }
  if (separator != all.end()) arguments.command.assign(separator + 1, all.end());
  if (app.got_subcommand("run")) return guarded("run", [&] { return run(arguments); });
  if (app.got_subcommand("bench")) return guarded("bench comm", [&] { return bench(arguments, all); });
  if (app.got_subcommand("doctor")) return guarded("doctor", [&] { return doctor(arguments); });
  return report("fsdp: expected a subcommand: run, bench or doctor; see fsdp --help", kUsageError);
}
