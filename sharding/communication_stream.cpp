#include "sharding/communication_stream.h"

#include <algorithm>

#include <fmt/format.h>

#include <fsdp/error.h>

namespace fsdp {

CommunicationStream::CommunicationStream(Communicator& communicator, std::function<void()> on_progress)
    : communicator_(communicator), on_progress_(std::move(on_progress)), thread_([this] { loop(); }) {}

void CommunicationStream::stop() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  enqueued_.notify_all();
  communicator_.ring();
  if (thread_.joinable()) thread_.join();
}

void CommunicationStream::enqueue(Job job) {
  bool ring = false;
  {
    const std::lock_guard lock(mutex_);
    jobs_.push_back(std::move(job));
    ring = waits_for_peers_;
  }
  enqueued_.notify_all();
  if (ring) communicator_.ring();
}

void CommunicationStream::check() const {
  const std::lock_guard lock(mutex_);
  if (failure_ != nullptr) std::rethrow_exception(failure_);
}

bool CommunicationStream::take(Job& job) {
  const auto next_ready = [this] {
    return std::find_if(jobs_.begin(), jobs_.end(), [](const Job& candidate) { return candidate.ready(); });
  };
  std::unique_lock lock(mutex_);
  for (;;) {
    // With nothing to do the wait has no limit: the program may pause between steps. A job that waits for a peer has
    // one.
    enqueued_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (stopping_) return false;
    if (const auto next = next_ready(); next != jobs_.end()) {
      job = std::move(*next);
      jobs_.erase(next);
      return true;
    }
    const std::string what = jobs_.front().what;
    waits_for_peers_ = true;
    lock.unlock();
    communicator_.wait_until(
        [&] {
          const std::lock_guard relock(mutex_);
          return stopping_ || next_ready() != jobs_.end();
        },
        what);
    lock.lock();
    waits_for_peers_ = false;
  }
}

void CommunicationStream::loop() {
  std::string what = "a gather or reduction";
  try {
    for (Job job; take(job);) {
      what = job.what;
      job.run();
      on_progress_();
    }
  } catch (...) {
    fail(std::current_exception(), what);
  }
}

void CommunicationStream::fail(std::exception_ptr error, const std::string& what) noexcept {
  std::string text = what + " failed";
  try {
    std::rethrow_exception(error);
  } catch (const CommunicationError& e) {
    text = fmt::format("{}: {}", what, e.what());  // `what` names rank and step
    error = std::make_exception_ptr(CommunicationError(text, e.rank()));
  } catch (const std::exception& e) {
    text = fmt::format("{}: {}", what, e.what());
  } catch (...) {
  }
  communicator_.abort(text);
  {
    const std::lock_guard lock(mutex_);
    if (failure_ == nullptr) failure_ = error;
    jobs_.clear();
  }
  on_progress_();
}

}  // namespace fsdp
