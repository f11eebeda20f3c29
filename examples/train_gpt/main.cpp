// train_gpt: trains a GPT on text. The training itself is in sharded_training.cpp, its counterpart without libfsdp in plain_training.cpp.
#include <cmath>
#include <cstdio>
#include <exception>
#include <string>

#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <fmt/format.h>
#include <fsdp/context.h>

#include "examples/train_gpt/allocation_counter.h"
#include "examples/train_gpt/corpus.h"
#include "examples/train_gpt/options.h"
#include "examples/train_gpt/plain_training.h"
#include "examples/train_gpt/report.h"
#include "examples/train_gpt/sharded_training.h"

namespace gpt {
namespace {

constexpr int kFailure = 1, kUsage = 2;

void introduce(const fsdp::Context& context, const Options& options, const Corpus& corpus, Report& report) {
  const auto& model = options.model;
  report.line(fmt::format("train_gpt  {} layers, width {}, {} heads, context {}; {} rank(s) on {}, {} thread(s) each{}",
                          model.layers, model.width, model.heads, model.context, context.world_size(),
                          context.backend(), at::get_num_threads(), options.plain ? "; plain LibTorch" : ""));
  report.line(fmt::format("text       {} file(s), {} to train on, {} held out", corpus.files(),
                          format_bytes(static_cast<std::size_t>(corpus.train_bytes())),
                          format_bytes(static_cast<std::size_t>(corpus.held_out_bytes()))));
}

void conclude(const Summary& summary, Report& report) {
  if (!summary.sample.empty()) report.passage(summary.sample);
  report.heading("result");
  report.line(fmt::format("  held-out loss {:.6f} nats per byte; knowing nothing gives {:.4f}, pairs of bytes {:.4f}",
                          summary.held_out_after.value_or(NAN), std::log(static_cast<double>(kVocabulary)),
                          summary.bigram_entropy));
}

void run(const Options& options) {
  if (options.threads > 0) at::set_num_threads(options.threads);
  auto& allocations = AllocationCounter::install();
  const auto context = fsdp::init();
  check_world_size(options, context.world_size());
  const auto corpus = Corpus::read(options.data, options.model.context);
  Report report(context.is_main());
  introduce(context, options, corpus, report);

  at::manual_seed(static_cast<std::uint64_t>(options.seed));
  const auto summary = options.plain ? train_plain(options, corpus, allocations, report)
                                     : train_sharded(context, options, corpus, allocations, report);
  conclude(summary, report);
  if (context.is_main() && !options.summary.empty()) write_summary(options.summary, summary);
}

// One line: a LibTorch error carries its stack in further ones.
int complain(const std::exception& error, int exit_code) {
  const std::string text = error.what();
  fmt::print(stderr, "train_gpt: {}\n", text.substr(0, text.find('\n')));
  return exit_code;
}

}  // namespace
}  // namespace gpt

int main(int argc, char** argv) {
  try {
    const auto line = gpt::parse_command_line(argc, argv);
    if (line.help.empty()) {
      gpt::run(line.options);
    } else {
      fmt::print("{}", line.help);
    }
    return 0;
  } catch (const gpt::UsageError& error) {
    return gpt::complain(error, gpt::kUsage);
  } catch (const std::exception& error) {
    return gpt::complain(error, gpt::kFailure);
  }
}
