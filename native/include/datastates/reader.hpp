#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>
#include <unordered_map>

#include "datastates/copy_engine.hpp"
#include "datastates/host_cache.hpp"
#include "datastates/io_backend.hpp"
#include "datastates/read_state.hpp"

namespace datastates {

/// The thread that owns the read backend: reads extents, verifies them, and puts them in place,
/// jobs one after the other, many extents of one job at a time. It holds blocks only for its own
/// reads and copies, which need nothing else, so it can always go on.
class Reader {
  public:
    Reader(HostCache& cache, std::unique_ptr<IoBackend> backend, unsigned queue_depth);
    /// REQUIRES: every job is done.
    ~Reader() = default;
    Reader(const Reader&) = delete;
    Reader& operator=(const Reader&) = delete;
    Reader(Reader&&) = delete;
    Reader& operator=(Reader&&) = delete;

    /// Thread-safe.
    void enqueue(std::shared_ptr<ReadState> job);

  private:
    /// An extent being read: in parts, when only a part of it can go past the page cache.
    struct Reading {
        std::size_t index;
        std::optional<Block> block;  // none: in place
        std::byte* data;             // where the extent's first byte goes
        unsigned parts = 0;
    };
    struct Part {
        std::shared_ptr<Reading> reading;
        IoRequest request;
    };
    /// A block whose bytes are on their way to devices.
    struct Copying {
        Block block;
        std::vector<std::shared_ptr<Event>> events;
    };

    void run(const std::stop_token& stop);
    void read(ReadState& job);
    bool start_next(ReadState& job, std::size_t index);
    std::byte* in_place(ReadState& job, const ReadPlan::Extent& extent) const;
    void submit(ReadState& job, const std::shared_ptr<Reading>& reading, std::byte* buffer,
                std::uint64_t offset, std::size_t length, std::size_t required);
    void reap(ReadState& job);
    void complete(ReadState& job, Reading& reading);
    void verify(const ReadState& job, const ReadPlan::Extent& extent, const std::byte* data);
    void scatter(const ReadState& job, const ReadPlan::Extent& extent, const std::byte* data,
                 Block block);
    void release_copied(ReadState& job, bool wait);

    HostCache& cache_;
    std::unique_ptr<IoBackend> backend_;
    const unsigned queue_depth_;
    std::mutex mutex_;
    std::condition_variable_any queued_;
    std::deque<std::shared_ptr<ReadState>> queue_;
    // The thread's own, for the job at hand.
    std::unordered_map<std::uint64_t, Part> in_flight_;
    std::deque<Copying> copying_;
    std::uint64_t next_token_ = 0;
    ReadStats stats_;
    std::jthread thread_;  // last: joins first
};

}  // namespace datastates
