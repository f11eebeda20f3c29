#include <fsdp/testing.h>

#include <cerrno>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <mutex>
#include <system_error>
#include <thread>

#include <fmt/format.h>

#include <fsdp/error.h>

#include "comm/control_block.h"
#include "comm/recording_communicator.h"
#include "comm/shm_communicator.h"
#include "comm/tcp_communicator.h"
#include "comm/thread_communicator.h"

namespace fsdp {
namespace {

// A folder of mode 700 that goes with the object.
class PrivateDirectory {
 public:
  PrivateDirectory() {
    std::string name = (std::filesystem::temp_directory_path() / "fsdp-ranks-XXXXXX").string();
    if (::mkdtemp(name.data()) == nullptr)
      throw CommunicationError(fmt::format("run_ranks: mkdtemp {}: {}", name, std::generic_category().message(errno)));
    path_ = name;
  }
  ~PrivateDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  PrivateDirectory(const PrivateDirectory&) = delete;
  PrivateDirectory& operator=(const PrivateDirectory&) = delete;
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

// The first error of any rank, by time.
class FirstError {
 public:
  void offer(int rank, std::exception_ptr error) {
    const std::lock_guard lock(mutex_);
    if (error_) return;
    rank_ = rank;
    error_ = std::move(error);
  }

  void rethrow_if_any() const {
    if (!error_) return;
    const auto text = [&](const Error& error) { return fmt::format("rank {}: {}", rank_, error.what()); };
    try {
      std::rethrow_exception(error_);
    } catch (const InvalidArgument& error) {
      throw InvalidArgument(text(error), error.rank());
    } catch (const CommunicationError& error) {
      throw CommunicationError(text(error), error.rank());
    } catch (const DeviceError& error) {
      throw DeviceError(text(error), error.rank());
    } catch (const CheckpointError& error) {
      throw CheckpointError(text(error), error.rank());
    } catch (const MemoryError& error) {
      throw MemoryError(text(error), error.rank());
    }
  }

 private:
  std::mutex mutex_;
  int rank_ = -1;
  std::exception_ptr error_;
};

std::string what_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& exception) {
    return exception.what();
  } catch (...) {
    return "an exception that is no std::exception";
  }
}

using Connect = std::function<std::shared_ptr<PeerCommunicator>(int rank)>;

void run_rank(int rank, int world_size, const Connect& connect, const std::function<void(Context)>& body,
              const RunRanksOptions& options, FirstError& first_error) {
  std::shared_ptr<RecordingCommunicator> communicator;
  try {
    communicator = std::make_shared<RecordingCommunicator>(connect(rank), options.faults, options.on_record);
    body(Context(communicator, rank, world_size));
  } catch (...) {
    if (communicator && communicator->is_dead()) return;  // what the others then say is what counts
    const std::exception_ptr error = std::current_exception();
    // Recorded before the abort: what the abort then throws on other ranks comes second.
    first_error.offer(rank, error);
    if (communicator) communicator->abort(what_of(error));
  }
}

void run_threads(int world_size, const Connect& connect, const std::function<void(Context)>& body,
                 const RunRanksOptions& options) {
  FirstError first_error;
  {
    std::vector<std::jthread> threads;
    for (int rank = 0; rank < world_size; ++rank) {
      threads.emplace_back([&, rank] { run_rank(rank, world_size, connect, body, options, first_error); });
    }
  }
  first_error.rethrow_if_any();
}

}  // namespace

void run_ranks(int world_size, const std::function<void(Context)>& body, const RunRanksOptions& options) {
  if (world_size < 1 || world_size > kMaxWorldSize) {
    throw InvalidArgument(
        fmt::format("run_ranks: expected a world size in [1, {}], got {}", kMaxWorldSize, world_size));
  }
  if (options.timeout.count() <= 0) {
    throw InvalidArgument(fmt::format("run_ranks: expected a positive timeout, got {} ms", options.timeout.count()));
  }
  check_faults(options.faults, world_size);
  if (options.backend == "thread") {
    auto communicators = make_thread_communicators(world_size, options.timeout);
    run_threads(
        world_size, [&](int rank) { return std::move(communicators[static_cast<std::size_t>(rank)]); }, body, options);
  } else if (options.backend == "shm") {
    const PrivateDirectory directory;
    const auto socket = directory.path() / "rendezvous";
    run_threads(
        world_size,
        [&](int rank) {
          return make_shm_communicator({socket, false, rank, world_size, options.timeout});
        },
        body, options);
  } else if (options.backend == "tcp") {
    UniqueFd listener = listen_at(resolve("127.0.0.1", 0).front());
    const TcpSpot spot{{local_address(listener)}, random_token()};
    run_threads(
        world_size,
        [&](int rank) {
          return make_tcp_communicator({.name = spot.addresses[0].to_string(),
                                        .rank = rank,
                                        .world_size = world_size,
                                        .timeout = options.timeout,
                                        .find = [&spot] { return spot; },
                                        .listener = rank == 0 ? std::move(listener) : UniqueFd(),
                                        .token = spot.token})
              .communicator;
        },
        body, options);
  } else {
    throw InvalidArgument(fmt::format("run_ranks: expected backend thread, shm or tcp, got \"{}\"", options.backend));
  }
}

}  // namespace fsdp
