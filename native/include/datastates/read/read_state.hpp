#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "datastates/base/deadline.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/timeline.hpp"
#include "datastates/io/file.hpp"
#include "datastates/memory/job_devices.hpp"
#include "datastates/plan.hpp"

namespace datastates {

struct ReadStats {
    std::uint64_t bytes_needed = 0;
    std::uint64_t bytes_read = 0;
    std::uint64_t in_place_bytes = 0;  // read directly into their destination
    std::uint64_t cached_bytes = 0;    // needed bytes that were in the page cache or in memory
    double seconds = 0;                // from submit_read to the end
    bool direct = false;
};

/// The state of one read. The job's owner, the reader and the workers share it. Submit fills the
/// devices before the reader knows the job. A mutex guards the error and the result.
class ReadState {
  public:
    ReadState(std::unique_ptr<File> file, std::shared_ptr<const ReadPlan> plan, Buffers buffers);

    const ReadPlan& plan() const { return *plan_; }
    const Buffers& buffers() const { return buffers_; }
    File& file() { return *file_; }
    JobDevices& devices() { return devices_; }
    const JobDevices& devices() const { return devices_; }
    bool memory_backed() const { return file_->traits().in_memory; }
    const std::string& path() const { return file_->path(); }

    // For the reader and its workers.
    /// Stops the job: no later extent begins. Of several errors the one of the lowest extent is
    /// kept. Thread-safe.
    void fail(std::size_t extent, const Error& error);
    /// Whether an error at or before `extent` is known, so that `extent` no longer matters. After a
    /// failure the extents before the failed one still do, because the failure of the lowest extent
    /// is reported. Thread-safe.
    bool settled(std::size_t extent) const;
    Timeline& timeline() { return timeline_; }
    const Timeline& timeline() const { return timeline_; }
    /// Closes the file and ends the job.
    void finish(ReadStats stats);

    // For the owner. Thread-safe.
    void stop();
    bool stopped() const { return stopped_.load(std::memory_order_acquire); }
    /// Waits for the end. Throws the read's error; false when the deadline passes first.
    bool wait(Deadline deadline) const;
    /// Waits for the end; does not throw the read's error.
    void wait_done() const;
    bool done() const;
    ReadStats stats() const;

  private:
    const std::shared_ptr<const ReadPlan> plan_;
    const Buffers buffers_;
    const std::unique_ptr<File> file_;
    const Clock::time_point start_ = Clock::now();
    JobDevices devices_;
    std::atomic<bool> stopped_ = false;

    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    bool done_ = false;
    std::optional<Error> error_;
    std::size_t error_extent_ = 0;
    ReadStats stats_;
    Timeline timeline_;
};

}  // namespace datastates
