#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "datastates/base/timeline.hpp"
#include "datastates/base/worker_pool.hpp"
#include "datastates/io/io_backend.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/read/read_state.hpp"

namespace datastates {

/// Runs read jobs, in a thread that owns the read backend. Owned by the executor. It does one job
/// after the other, and many extents of a job at a time.
///
/// The thread chooses how each extent is read. The backend reads extents from storage. Workers read
/// extents that are in memory already (page cache, tmpfs) and sparse ones; they also verify every
/// extent and fill host destinations. The thread starts the copies to devices. The thread is no
/// background thread (see work_in_background), because it has to keep the workers busy.
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
    /// Wakes the thread from a wait for its backend. Thread-safe.
    void look_again();
    /// Ends a job that has not begun; false if it has begun. Thread-safe.
    bool withdraw(const ReadState& job);

  private:
    /// An extent under way. It has two parts if only one of them can use direct I/O.
    struct Reading {
        ReadState* owner;            // the current job, or the read-ahead before it
        std::size_t index;           // in the owner's plan
        std::optional<Block> block;  // none: read in place
        std::byte* data;             // the place of the extent's first byte
        std::uint32_t track;
        Clock::time_point begin;
        unsigned parts = 0;
        std::uint64_t bytes_read = 0;
        bool kept = false;  // it was read ahead
    };
    struct Part {
        std::shared_ptr<Reading> reading;
        IoRequest request;
    };
    /// A block whose bytes are being copied to devices.
    struct Copying {
        std::shared_ptr<Reading> reading;
        Clock::time_point begin;
        std::uint64_t bytes = 0;
        std::vector<std::shared_ptr<Event>> events;
    };

    void run(const std::stop_token& stop);
    void read(ReadState& job);
    bool has_room() const;
    bool is_taken_over(const ReadState& job);
    void take_over(ReadState& job, ExtentsAhead& extents_ahead);
    bool start_next(ReadState& job, std::size_t index);
    void start_direct(ReadState& job, const std::shared_ptr<Reading>& reading);
    static std::byte* in_place(ReadState& job, const ReadPlan::Extent& extent, bool cached);
    void submit(ReadState& job, const std::shared_ptr<Reading>& reading, std::byte* buffer,
                std::uint64_t offset, std::size_t length, std::size_t required);
    void reap(ReadState& job);
    void keep(ReadState& job, Reading& reading);
    void start_work(ReadState& job, std::shared_ptr<Reading> reading, bool through_cache);
    static void work(ReadState& job, Reading& reading, bool through_cache, unsigned worker);
    void take_worked(ReadState& job, bool wait);
    void copy_to_devices(ReadState& job, const std::shared_ptr<Reading>& reading);
    void release_copied(ReadState& job, bool wait);

    HostCache& cache_;
    WorkerPool& workers_;
    std::unique_ptr<IoBackend> backend_;
    const unsigned queue_depth_;
    std::mutex mutex_;
    std::condition_variable_any queued_;
    std::deque<std::shared_ptr<ReadState>> queue_;
    std::condition_variable work_done_;
    std::list<std::shared_ptr<Reading>> worked_;
    // Used by the thread only, for the current job.
    std::unordered_map<std::uint64_t, Part> in_flight_;
    std::shared_ptr<ReadState> leaving_;     // a read-ahead whose last reads are in flight
    std::unordered_set<std::size_t> taken_;  // extents taken over: do not begin them
    std::size_t working_ = 0;                // extents that workers have
    std::size_t working_kept_ = 0;           // of these, extents that were read ahead
    std::deque<Copying> copying_;
    std::uint64_t next_token_ = 0;
    Tracks tracks_;
    ReadStats stats_;
    std::jthread thread_;  // last: joins first
};

}  // namespace datastates
