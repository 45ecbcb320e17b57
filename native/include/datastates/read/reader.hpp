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

/// The thread that owns the read backend: it decides how each extent is read and starts what must
/// be done with it, jobs one after the other, many extents of one job at a time. Extents that are
/// in memory already (the page cache, tmpfs), and those of many small spans, are read by workers,
/// which also verify all extents and fill host destinations; copies to devices are started here. It
/// holds blocks for its own reads and copies, which need nothing else, and at most half of them for
/// what was read ahead, so it can always go on. Other than the workers, which it keeps busy, it is
/// no thread of the background: it is to come before them.
class Reader {
  public:
    Reader(HostCache& cache, WorkerPool& workers, std::unique_ptr<IoBackend> backend,
           unsigned queue_depth);
    /// REQUIRES: every job is done.
    ~Reader() = default;
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    Reader(Reader&&) = delete;
    Reader& operator=(Reader&&) = delete;

    /// Thread-safe.
    void enqueue(const std::shared_ptr<ReadState>& job);
    /// What it waits for may have come in another way than by its backend. Thread-safe.
    void look_again();
    /// Ends a job that has not been begun; false where it has. Thread-safe.
    bool withdraw(const ReadState& job);

  private:
    /// An extent on its way: in parts, when only a part of it can go past the page cache.
    struct Reading {
        ReadState* owner;            // the job at hand, or the one whose last reads it goes on with
        std::size_t index;           // in the owner's plan
        std::optional<Block> block;  // none: in place
        std::byte* data;             // where the extent's first byte goes
        std::uint32_t track;
        Clock::time_point begin;
        unsigned parts = 0;
        std::uint64_t bytes_read = 0;
        bool kept = false;  // by the job before
    };
    struct Part {
        std::shared_ptr<Reading> reading;
        IoRequest request;
    };
    /// A block whose bytes are on their way to devices.
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
    void take_over(ReadState& job, Shelf& shelf);
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
    // The thread's own, for the job at hand.
    std::unordered_map<std::uint64_t, Part> in_flight_;
    std::shared_ptr<ReadState> leaving_;     // over, but for reads that the job at hand took over
    std::unordered_set<std::size_t> taken_;  // extents that need not be begun
    std::size_t working_ = 0;                // extents that are with the workers
    std::size_t working_kept_ = 0;           // of these, what the job before had read
    std::deque<Copying> copying_;
    std::uint64_t next_token_ = 0;
    Tracks tracks_;
    ReadStats stats_;
    std::jthread thread_;  // last: joins first
};

}  // namespace datastates
