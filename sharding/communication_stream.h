// The engine's own thread for gathers and reductions. Jobs run one at a time, each as soon as it is ready, in the
// order of their enqueueing among those that are: a job that waits for a peer never holds up another.
#pragma once

#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

#include <fsdp/communicator.h>

namespace fsdp {

class CommunicationStream {
 public:
  struct Job {
    std::function<bool()> ready;  // reads atomics and what the job owns; called often, by the stream
    std::function<void()> run;
    std::string what;  // for errors: "gather of layers.3"
  };

  // `on_progress` is called from the stream's thread after each job, and when one fails.
  CommunicationStream(Communicator& communicator, std::function<void()> on_progress);
  ~CommunicationStream() { stop(); }

  // Ends the thread after the job it is in; jobs that have not begun are dropped. What the jobs use may go after this.
  void stop();

  void enqueue(Job job);
  // Runs what is ready, and too small for a hand-over, on the calling thread; a failure is one of the stream.
  template <class Run, class Describe>
  void run_here(const Run& run, const Describe& describe) {
    try {
      run();
    } catch (...) {
      fail(std::current_exception(), describe());
      check();
    }
  }
  // Rethrows the first failure of a job; the communicator has been aborted with its text.
  void check() const;

 private:
  void loop();
  // Waits for a job that is ready and takes it; false when the stream stops.
  bool take(Job& job);
  void fail(std::exception_ptr error, const std::string& what) noexcept;

  Communicator& communicator_;
  std::function<void()> on_progress_;
  mutable std::mutex mutex_;
  std::condition_variable enqueued_;
  std::deque<Job> jobs_;
  std::exception_ptr failure_;
  bool stopping_ = false, waits_for_peers_ = false;
  std::thread thread_;
};

}  // namespace fsdp
