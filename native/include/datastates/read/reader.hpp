#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <stop_token>
#include <thread>

#include "datastates/base/timeline.hpp"
#include "datastates/base/unmovable.hpp"
#include "datastates/base/worker_pool.hpp"
#include "datastates/io/io_backend.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/read/read_inbox.hpp"
#include "datastates/read/read_state.hpp"
#include "datastates/read/reading.hpp"
#include "datastates/read/storage_reads.hpp"

namespace datastates {

/// Runs read jobs, in a thread that owns the read backend. Owned by the executor. It has many
/// extents under way at a time. It begins them job by job, and a job begins once all extents of
/// those before it have begun: many files are read as fast as one.
///
/// The thread chooses how each extent is read. The backend reads extents from storage, and those of
/// handed files. Workers read
/// extents that are in memory already (page cache, tmpfs), and sparse and shared ones, through the
/// page cache. They also verify every extent, fill host destinations, and start the copies to
/// devices. The thread is no background
/// thread (see work_in_background), because it has to keep the workers busy.
///
/// It cannot deadlock: its own reads and copies need no block but the one that they hold.
class Reader : Unmovable {
  public:
    Reader(HostCache& cache, WorkerPool& workers, std::unique_ptr<IoBackend> backend,
           unsigned queue_depth);
    /// Joins the thread. REQUIRES: every job is done.
    ~Reader();

    /// Queues a job. If this throws, the job is done. Thread-safe.
    void enqueue(const std::shared_ptr<ReadState>& job);

  private:
    void run(const std::stop_token& stop);
    bool wait_for_jobs(const std::stop_token& stop);
    void begin_extents();
    bool begin_job();
    bool has_room() const;
    bool may_begin_job() const;
    bool start_next(ReadRun& run);
    std::byte* memory_for(ReadRun& run, Reading& reading, bool cached, bool through_cache);
    std::shared_ptr<Block> take_block(const Reading& reading);
    void wait();
    void reap();
    void take_read(const std::shared_ptr<Reading>& reading);
    void start_work(std::shared_ptr<Reading> reading);
    static void work(Reading& reading, unsigned worker);
    void take_worked(bool wait);
    void release_copied(bool wait);
    void end(const Reading& reading);
    void finish_jobs();

    HostCache& cache_;
    WorkerPool& workers_;
    std::unique_ptr<IoBackend> backend_;
    const unsigned queue_depth_;
    ReadInbox inbox_;
    // Used by the thread only.
    ReadRuns runs_;  // in their order; only the last one has extents that have not begun
    StorageReads reads_;
    std::size_t working_ = 0;         // extents that workers have
    Readings copying_;                // their bytes are being copied to devices
    std::shared_ptr<Block> windows_;  // shared by extents, each with a window of it
    std::size_t windows_end_ = 0;     // from here on it is free
    bool lacks_room_ = false;         // another extent would begin, had it room or a block
    Tracks tracks_;
    std::optional<HostCache::Hurry> hurry_;  // while there is a job
    std::jthread thread_;                    // last: joins first
};

}  // namespace datastates
