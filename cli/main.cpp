// The `fsdp` program. Exit codes: 0 good, 2 usage, 1 the launcher itself failed; `run` else gives the failed rank's own.
#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

#include <fsdp/error.h>

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
};

// Parses what stands before "--". Throws CLI::ParseError, also for --help and --version.
void parse(CLI::App& app, std::vector<std::string> words, Arguments& arguments) {
  app.set_version_flag("--version", "fsdp " FSDP_VERSION " (LibTorch " FSDP_LIBTORCH_VERSION ")");
  app.set_help_flag("-h,--help", "Show this text");
  auto* run = app.add_subcommand("run", "Start N ranks of a program on this host: fsdp run -n N -- program args...");
  run->add_option("-n,--ranks", arguments.ranks, "Number of ranks")->required()->type_name("N");
  run->add_option("--backend", arguments.backend, "How ranks share bytes (FSDP_BACKEND): auto, shm or tcp")
      ->check(CLI::IsMember({"auto", "shm", "tcp"}));
  run->footer(
      "Each rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT, TORCHELASTIC_RUN_ID,\n"
      "OMP_NUM_THREADS (cores / N, unless set), FSDP_RENDEZVOUS and FSDP_JOB_TOKEN; its stdin is /dev/null. The first "
      "rank that fails "
      "ends\n"
      "the job, and its exit code (128 + n for signal n) is that of fsdp run.");
  std::reverse(words.begin(), words.end());  // CLI11 takes a vector from its end
  app.parse(words);
}

int run(const Arguments& arguments) {
  try {
    if (arguments.command.empty())
      throw fsdp::InvalidArgument("no program to start; name it after --, e.g. fsdp run -n 2 -- ./train");
    return fsdp::run_job(
        {.ranks = parse_ranks(arguments.ranks), .backend = arguments.backend, .command = arguments.command});
  } catch (const fsdp::InvalidArgument& error) {
    return report(std::string("fsdp run: ") + error.what(), kUsageError);
  } catch (const std::exception& error) {
    return report(std::string("fsdp run: ") + error.what(), 1);
  }
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
  if (!app.got_subcommand("run")) return report("fsdp: expected a subcommand: run; see fsdp --help", kUsageError);
  if (separator != all.end()) arguments.command.assign(separator + 1, all.end());
  return run(arguments);
}
