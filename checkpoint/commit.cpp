#include "checkpoint/commit.h"

#include <algorithm>
#include <cstring>
#include <optional>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "checkpoint/agreement.h"
#include "checkpoint/job_lock.h"
#include "checkpoint/manifest.h"
#include "checkpoint/shard_writer.h"
#include "checkpoint/step_directory.h"
#include "checkpoint/xxh3.h"

namespace fsdp {
namespace {

// What the ranks must have in common before a byte is written, sent as it lies in memory.
struct Proposal {
  std::int64_t step = 0;
  std::uint64_t digest = 0;  // of tied names and scalars
  std::uint64_t model_files = 1, optim_files = 1;
};

std::string to_text(const Proposal& proposal) { return {reinterpret_cast<const char*>(&proposal), sizeof proposal}; }

Proposal propose(const CheckpointContent& content, const ShardPlan& plan) {
  if (content.step < 0) throw CheckpointError(fmt::format("expected a step of at least 0, got {}", content.step));
  Manifest shared;
  shared.tied = content.tied;
  shared.scalars = content.scalars;
  const std::string text = to_json(shared);
  return {content.step, xxh3_64(std::as_bytes(std::span(text))), std::max<std::uint64_t>(plan.model.size(), 1),
          std::max<std::uint64_t>(plan.optim.size(), 1)};
}

// Every rank sees the same proposals, so that all of them throw here or none.
Proposal agree(const std::vector<std::string>& texts, const std::string& what) {
  Proposal agreed;
  for (std::size_t rank = 0; rank < texts.size(); ++rank) {
    Proposal proposal;
    std::memcpy(&proposal, texts[rank].data(), sizeof proposal);
    if (rank == 0) agreed = proposal;
    if (proposal.step != agreed.step) {
      throw CheckpointError(fmt::format("{} failed on rank {}: expected step {} as on rank 0, got {}", what, rank,
                                        agreed.step, proposal.step),
                            static_cast<int>(rank));
    }
    if (proposal.digest != agreed.digest) {
      throw CheckpointError(
          fmt::format("{} failed on rank {}: expected the tied names and scalars of rank 0, got others", what, rank),
          static_cast<int>(rank));
    }
    agreed.model_files = std::max(agreed.model_files, proposal.model_files);
    agreed.optim_files = std::max(agreed.optim_files, proposal.optim_files);
  }
  return agreed;
}

void write_text_file(FileSystem& system, const std::filesystem::path& path, const std::string& text) {
  File file = File::create(system, path, 0600);
  file.reserve(text.size());
  file.write(0, std::as_bytes(std::span(text)));
  file.sync();
  file.close();
}

// Rank 0's part of a save: it alone makes, renames and removes directories.
class StepCommit {
 public:
  StepCommit(FileSystem& system, std::filesystem::path dir, std::int64_t step)
      : system_(system), dir_(std::move(dir)), step_(step), save_id_(random_id()) {}

  std::filesystem::path committed() const { return dir_ / step_name(step_); }
  std::filesystem::path temporary() const { return dir_ / temporary_name(step_, save_id_); }
  const std::string& save_id() const { return save_id_; }

  // Under the lock no other save is alive here, so every temporary name is one that a dead save left.
  void begin() {
    make_directories(system_, dir_);
    lock_.emplace(system_, dir_);
    for (const std::string& name : list_directory(system_, dir_)) {
      if (is_temporary(name) || name.starts_with(std::string(kLatestName) + ".tmp-")) remove_tree(system_, dir_ / name);
    }
    if (path_exists(system_, committed()) && !path_exists(system_, committed() / kManifestName)) {
      throw CheckpointError(fmt::format("{} exists but holds no {}: it is no checkpoint of this library; move it away",
                                        committed().string(), kManifestName));
    }
    make_directory(system_, temporary(), 0700);
    for (const char* kind : {"model", "optim", "rank"}) make_directory(system_, temporary() / kind, 0700);
  }

  void commit(const Manifest& manifest) {
    check_coverage(manifest);
    const std::string text = to_json(manifest);
    parse_manifest(text);  // what could not be read again must not be committed
    write_text_file(system_, temporary() / kManifestName, text);
    sync_directory(system_, temporary());
    const bool replaces = path_exists(system_, committed());
    if (replaces) {
      exchange_paths(system_, temporary(), committed());
    } else {
      rename_path(system_, temporary(), committed());
    }
    sync_directory(system_, dir_);
    if (replaces) remove_tree(system_, temporary());
    write_latest();
  }

  // After a failure. What cannot be removed now, the next save will: the failure itself is what the user must hear of.
  void roll_back() noexcept {
    try {
      if (lock_) remove_tree(system_, temporary());
    } catch (const std::exception&) {
    }
  }

 private:
  // For people and scripts; the loader looks at the directories themselves.
  void write_latest() {
    const std::filesystem::path temporary_file = dir_ / fmt::format("{}.tmp-{}", kLatestName, save_id_);
    write_text_file(system_, temporary_file, step_name(step_) + "\n");
    rename_path(system_, temporary_file, dir_ / kLatestName);
    sync_directory(system_, dir_);
  }

  FileSystem& system_;
  std::filesystem::path dir_;
  std::int64_t step_;
  std::string save_id_;
  std::optional<JobLock> lock_;
};

Manifest merge_reports(const std::vector<std::string>& reports, const CheckpointContent& content) {
  std::vector<Manifest> parts;
  for (const std::string& report : reports) parts.push_back(parse_manifest(report));
  Manifest manifest = merge(std::move(parts));
  manifest.tied = content.tied;
  return manifest;
}

}  // namespace

std::filesystem::path save_checkpoint(Communicator& communicator, FileSystem& system, const std::filesystem::path& dir,
                                      const CheckpointContent& content) {
  std::string what = "save to " + dir.string();
  ShardPlan plan;
  const std::vector<std::string> proposals = on_all_ranks(communicator, what, [&] {
    plan = plan_shards(content.views);
    return to_text(propose(content, plan));
  });
  const Proposal agreed = agree(proposals, what);
  what = fmt::format("save of step {} to {}", agreed.step, dir.string());

  StepCommit commit(system, dir, agreed.step);
  try {
    const std::string save_id = on_rank_zero(communicator, what, [&] {
      commit.begin();
      return commit.save_id();
    });
    const SaveTarget target{.directory = dir / temporary_name(agreed.step, save_id),
                            .save_id = save_id,
                            .rank = communicator.rank(),
                            .world_size = communicator.world_size(),
                            .model_files = agreed.model_files,
                            .optim_files = agreed.optim_files};
    const std::vector<std::string> reports = on_all_ranks(
        communicator, what, [&] { return to_json(write_shards(system, target, content, plan)); });
    on_rank_zero(communicator, what, [&] {
      commit.commit(merge_reports(reports, content));
      return std::string();
    });
  } catch (const CheckpointError&) {
    // The error is agreed, so no rank writes any more. A lost peer (CommunicationError) may still be writing: its files
    // stay for the next save.
    commit.roll_back();
    throw;
  }
  return commit.committed();
}

std::filesystem::path save_checkpoint(Communicator& communicator, const std::filesystem::path& dir,
                                      const CheckpointContent& content) {
  FileSystem system;
  return save_checkpoint(communicator, system, dir.empty() ? "." : dir, content);
}

}  // namespace fsdp
