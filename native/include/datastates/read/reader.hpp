#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <unordered_map>
#include <unordered_set>

#include "datastates/base/timeline.hpp"
#include "datastates/base/worker_pool.hpp"
#include "datastates/io/io_backend.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/read/extent_read.hpp"
#include "datastates/read/read_state.hpp"

namespace datastates {

/// Runs read jobs, in a thread that owns the read backend. Owned by the executor. It has many
/// extents under way at a time. It begins them job by job, and a job begins once all extents of
/// those before it have begun: many files are read as fast as one.
///
/// The thread chooses how each extent is read. The backend reads extents from storage. Workers read
/// extents that are in memory already (page cache, tmpfs) and sparse ones; they also verify every
/// extent, fill host destinations, and start the copies to devices. The thread is no background
/// thread (see work_in_background), because it has to keep the workers busy.
///
/// It cannot deadlock: its own reads and copies need no block but the one that they hold, and a
/// read-ahead holds at most half of the blocks. A mutex guards what other threads hand over.
class Reader {
  public:
    Reader(HostCache& cache, WorkerPool& workers, std::unique_ptr<IoBackend> backend,
           unsigned queue_depth);
    /// Joins the thread. REQUIRES: every job is done.
    ~Reader() = default;
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    Reader(Reader&&) = delete;
    Reader& operator=(Reader&&) = delete;

    /// Queues a job. If this throws, the job is done. Thread-safe.
    void enqueue(const std::shared_ptr<ReadState>& job);
    /// Makes the thread look at its jobs again, for example after one was stopped. Thread-safe.
    void look_again();
    /// Ends a job that has not begun; false if it has begun. Thread-safe.
    bool withdraw(const ReadState& job);

  private:
    /// A job, queued or begun.
    struct Run {
        std::shared_ptr<ReadState> job;
        std::size_t next = 0;                     // the extents before it have begun
        std::unordered_set<std::size_t> taken{};  // extents taken over: do not begin them
        std::size_t under_way = 0;                // extents that have begun and have not ended
        std::size_t in_flight = 0;                // parts being read from its file
        ReadStats stats{};

        bool begun() const { return next == job->plan().extents().size() || !job->wants(next); }
        bool ended() const { return begun() && under_way == 0 && in_flight == 0; }
    };
    /// An extent under way. It has two parts if only one of them can use direct I/O.
    struct Reading {
        Run* run;
        std::size_t index;           // in the job's plan
        std::optional<Block> block;  // none: read in place
        std::byte* data;             // the place of the extent's first byte
        std::uint32_t track;
        Clock::time_point begin;
        unsigned parts = 0;
        std::uint64_t bytes_read = 0;
        bool kept = false;      // it was read ahead
        bool unwanted = false;  // it is being read ahead in vain
        Finished finished{};

        ReadState& job() const { return *run->job; }
        const ReadPlan::Extent& extent() const { return job().plan().extents()[index]; }
    };
    using Readings = std::list<std::shared_ptr<Reading>>;
    struct Part {
        std::shared_ptr<Reading> reading;
        Run* submitter;  // its file is read
        IoRequest request;
    };

    void run(const std::stop_token& stop);
    bool wait_for_jobs(const std::stop_token& stop);
    void begin_extents();
    bool begin_job();
    bool has_room() const;
    bool may_begin_job() const;
    void take_over(Run& run, ExtentsAhead& extents_ahead);
    bool start_next(Run& run);
    std::byte* memory_for(Run& run, Reading& reading, bool cached);
    void start_direct(const std::shared_ptr<Reading>& reading);
    void submit(const std::shared_ptr<Reading>& reading, std::byte* buffer, std::uint64_t offset,
                std::size_t length, std::size_t required);
    void wait();
    void reap();
    void take_completion(const IoCompletion& completion);
    static void keep(Reading& reading);
    void start_work(std::shared_ptr<Reading> reading, bool through_cache);
    static void work(Reading& reading, bool through_cache, unsigned worker);
    void take_worked(bool wait);
    void release_copied(bool wait);
    void end(const Reading& reading);
    void finish_jobs();

    HostCache& cache_;
    WorkerPool& workers_;
    std::unique_ptr<IoBackend> backend_;
    const unsigned queue_depth_;
    std::mutex mutex_;
    std::condition_variable_any changed_;
    std::list<Run> queue_;
    Readings worked_;       // workers have finished these
    bool reaping_ = false;  // the thread waits, or is about to wait, for its backend
    // Used by the thread only.
    std::list<Run> runs_;  // in their order; only the last one has extents that have not begun
    std::unordered_map<std::uint64_t, Part> in_flight_;
    std::size_t working_ = 0;       // extents that workers have
    std::size_t working_kept_ = 0;  // of these, extents that were read ahead
    Readings copying_;              // their bytes are being copied to devices
    bool lacks_room_ = false;       // another extent would begin, had it room or a block
    std::uint64_t next_token_ = 0;
    Tracks tracks_;
    std::jthread thread_;  // last: joins first
};

}  // namespace datastates
