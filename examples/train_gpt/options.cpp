#include "examples/train_gpt/options.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <CLI/CLI.hpp>

namespace gpt {

namespace fs = std::filesystem;

namespace {

template <class T>
CLI::Option* add(CLI::App& app, const char* flag, const char* type, T& value, const char* text) {
  return app.add_option(flag, value, text)->type_name(type);
}
template <class T>
CLI::Option* add_with_default(CLI::App& app, const char* flag, const char* type, T& value, const char* text) {
  return add(app, flag, type, value, text)->capture_default_str();
}

void declare_training(CLI::App& app, Options& o) {
  add(app, "--data", "PATH...", o.data, "Files or folders of text; folders are searched for source code and prose")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->default_str(TRAIN_GPT_DEFAULT_DATA_NAME);
  add_with_default(app, "--strategy", "NAME", o.strategy,
                   "What ranks share: full_shard, shard_gradients, shard_optimizer, or replicate nothing");
  add_with_default(app, "--shard-group", "N", o.shard_group, "Ranks that share one copy; 0 is all of them");
  add_with_default(app, "--precision", "NAME", o.precision, "fp32, or bf16 with fp32 master weights");
  add_with_default(app, "--layers", "N", o.model.layers, "Transformer blocks; each is one unit of sharding");
  add_with_default(app, "--width", "N", o.model.width, "Width of the residual stream");
  add_with_default(app, "--heads", "N", o.model.heads, "Attention heads; must divide --width");
  add_with_default(app, "--context", "N", o.model.context, "Bytes that the model sees at once");
  add_with_default(app, "--batch", "N", o.batch, "Windows per step over all ranks, whose number must divide it");
  add_with_default(app, "--steps", "N", o.steps, "Length of the learning-rate schedule");
  add(app, "--stop-after", "N", o.stop_after, "End after this step, in the middle of the schedule");
  add_with_default(app, "--lr", "X", o.lr, "Peak learning rate; warm-up, then a cosine to a tenth");
  add_with_default(app, "--seed", "N", o.seed, "Decides the weights at the start and every batch");
}

void declare_files(CLI::App& app, Options& o) {
  const auto out = add(app, "--out", "DIR", o.out, "Folder for sharded checkpoints");
  const auto every = add(app, "--save-every", "N", o.save_every, "Save each N steps too, not only at the end");
  const auto resume = app.add_flag("--resume", o.resume,
                                   "Go on from the newest checkpoint in --out, of any number of ranks");
  const auto consolidate = add(app, "--consolidate", "FILE", o.consolidate,
                               "At the end write all parameters to one safetensors file");
  const auto load = add(app, "--load", "FILE", o.load, "Read a consolidated file; evaluate and sample, no training");
  const auto plain = app.add_flag("--plain", o.plain,
                                  "The same in plain LibTorch, without libfsdp: one process, nothing saved");
  add(app, "--summary", "FILE", o.summary, "Write the figures of the run as JSON");
  every->needs(out);
  resume->needs(out);
  for (auto* option : {out, consolidate}) load->excludes(option);
  for (auto* option : {out, every, resume, consolidate, load}) plain->excludes(option);
}

void declare_running(CLI::App& app, Options& o) {
  add(app, "--sample", "N", o.sample, "Let the trained model write N bytes");
  add_with_default(app, "--log-every", "N", o.log_every, "Steps per line of output");
  add_with_default(app, "--threads", "N", o.threads,
                   "Intra-op threads per rank; 0 leaves it to LibTorch and OMP_NUM_THREADS");
  add_with_default(app, "--prefetch", "N", o.prefetch, "Units gathered ahead of use; 0 gathers on demand");
}

void require_at_least(std::string_view flag, std::int64_t value, std::int64_t least) {
  if (value < least) throw UsageError(fmt::format("{} must be at least {}, got {}", flag, least, value));
}

void require_one_of(std::string_view flag, std::string_view value, std::initializer_list<std::string_view> known) {
  if (std::find(known.begin(), known.end(), value) == known.end())
    throw UsageError(fmt::format("{} {} is not known: expected {}", flag, value, fmt::join(known, ", ")));
}

void check_counts(const Options& o) {
  require_at_least("--layers", o.model.layers, 1);
  require_at_least("--width", o.model.width, 1);
  require_at_least("--heads", o.model.heads, 1);
  require_at_least("--context", o.model.context, 1);
  require_at_least("--batch", o.batch, 1);
  require_at_least("--steps", o.steps, 1);
  require_at_least("--log-every", o.log_every, 1);
  for (const auto& [flag, value] : {std::pair<std::string_view, std::int64_t>{"--stop-after", o.stop_after},
                                    {"--save-every", o.save_every},
                                    {"--sample", o.sample},
                                    {"--seed", o.seed},
                                    {"--threads", o.threads},
                                    {"--prefetch", o.prefetch},
                                    {"--shard-group", o.shard_group}}) {
    require_at_least(flag, value, 0);
  }
  if (o.model.width % o.model.heads != 0) {
    throw UsageError(
        fmt::format("--heads {} does not divide --width {}: choose a width that is a multiple of the heads",
                    o.model.heads, o.model.width));
  }
  if (!std::isfinite(o.lr) || o.lr <= 0) throw UsageError(fmt::format("--lr must be positive, got {}", o.lr));
  require_one_of("--strategy", o.strategy, {"full_shard", "shard_gradients", "shard_optimizer", "replicate"});
  require_one_of("--precision", o.precision, {"fp32", "bf16"});
}

bool holds_checkpoint(const fs::path& folder) {
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    if (entry->path().filename().string().starts_with("step-")) return true;
  }
  return false;
}

// Found now and not after hours of training.
void check_files(const Options& o) {
  if (!o.out.empty() && fs::exists(o.out) && !fs::is_directory(o.out)) {
    throw UsageError(fmt::format("--out {} is a file: name a folder", o.out.string()));
  }
  if (!o.out.empty() && !o.resume && holds_checkpoint(o.out)) {
    throw UsageError(fmt::format(
        "--out {} already holds checkpoints: go on from them with --resume, or name another folder", o.out.string()));
  }
  if (o.resume && !holds_checkpoint(o.out)) {
    throw UsageError(
        fmt::format("--resume found no checkpoint in {}: check --out, or start without --resume", o.out.string()));
  }
  if (!o.load.empty() && !fs::is_regular_file(o.load)) {
    throw UsageError(fmt::format("--load {} is not a file: name one that --consolidate wrote", o.load.string()));
  }
  for (const auto& [flag, file] : {std::pair{"--consolidate", o.consolidate}, std::pair{"--summary", o.summary}}) {
    if (!file.empty() && !fs::is_directory(file.has_parent_path() ? file.parent_path() : fs::path("."))) {
      throw UsageError(fmt::format("{} {} lies in a folder that does not exist: make {} first", flag, file.string(),
                                   file.parent_path().string()));
    }
  }
}

}  // namespace

CommandLine parse_command_line(int argc, const char* const* argv) {
  CommandLine line;
  auto& options = line.options;
  CLI::App app("Trains a GPT on text, its parameters, gradients and optimizer state sharded over the ranks.",
               "train_gpt");
  app.footer("Ranks are started by a launcher: fsdp run -n 2 -- train_gpt --steps 500 --out runs/a");
  app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);  // so that a script may override
  declare_training(app, options);
  declare_files(app, options);
  declare_running(app, options);
  app.allow_extras();  // so that they can be named in the order of the command line
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    line.help = app.help();
    return line;
  } catch (const CLI::ParseError& error) {
    throw UsageError(fmt::format("{}; see train_gpt --help", error.what()));
  }
  if (const auto extras = app.remaining(); !extras.empty()) {
    throw UsageError(fmt::format("{} is not a flag of train_gpt; see train_gpt --help", extras.front()));
  }
  if (options.data.empty()) options.data = {TRAIN_GPT_DEFAULT_DATA};
  check_counts(options);
  check_files(options);
  return line;
}

void check_world_size(const Options& options, int world_size) {
  if (options.batch % world_size != 0) {
    throw UsageError(fmt::format(
        "--batch {} does not divide by {} ranks: the batch is that of all ranks together; choose a multiple, e.g. {}",
        options.batch, world_size, (options.batch / world_size + 1) * world_size));
  }
  if (options.plain && world_size != 1) {
    throw UsageError(
        fmt::format("--plain runs in one process, got {} ranks: start train_gpt without a launcher", world_size));
  }
}

double learning_rate(const Options& options, std::int64_t step) {
  const auto warm_up = std::max<std::int64_t>(options.steps / 20, 1);
  if (step < warm_up) return options.lr * static_cast<double>(step + 1) / static_cast<double>(warm_up);
  const double progress = static_cast<double>(step - warm_up) /
                          static_cast<double>(std::max<std::int64_t>(options.steps - warm_up, 1));
  return options.lr * (0.1 + 0.45 * (1.0 + std::cos(std::numbers::pi * progress)));
}

}  // namespace gpt
