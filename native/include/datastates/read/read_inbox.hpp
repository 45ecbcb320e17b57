#pragma once

#include <condition_variable>
#include <mutex>
#include <stop_token>
#include <vector>

#include "datastates/io/io_backend.hpp"
#include "datastates/read/reading.hpp"

namespace datastates {

/// What other threads hand to the reader's thread: jobs, and extents that workers have finished. It
/// wakes that thread where it waits, here or for its backend. Owned by the reader. A mutex guards
/// it.
class ReadInbox {
  public:
    /// `backend` outlives this.
    explicit ReadInbox(IoBackend& backend) : backend_(backend) {}

    // For any thread.
    /// Queues a job.
    void put(ReadRuns& job);
    /// Puts an extent that a worker has finished here.
    void put(Readings& worked);
    /// Makes the thread look at its jobs again, also if it is not waiting yet.
    void look_again();

    // For the reader's thread.
    /// Waits for a job. False when the thread has to end.
    bool wait_for_job(const std::stop_token& stop);
    /// Takes the next job; empty if there is none.
    ReadRuns take_job();
    /// Takes the extents that workers have finished. With `wait`, waits for one, for look_again(),
    /// or also for a job if the thread `may_begin` one.
    Readings take_worked(bool wait, bool may_begin);
    /// The backend's completions. Waits for one if there is nothing else to do.
    std::vector<IoCompletion> reap(bool may_begin);

  private:
    bool has_work(bool may_begin) const {
        return look_again_ || !worked_.empty() || (may_begin && !queue_.empty());
    }
    void wake_locked();

    IoBackend& backend_;
    std::mutex mutex_;
    std::condition_variable_any changed_;
    ReadRuns queue_;
    Readings worked_;
    bool look_again_ = false;
    bool reaping_ = false;  // the thread waits, or is about to wait, for its backend
};

}  // namespace datastates
