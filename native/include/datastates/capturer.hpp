#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <stop_token>
#include <thread>

#include "datastates/copy_engine.hpp"
#include "datastates/host_cache.hpp"
#include "datastates/write_state.hpp"
#include "datastates/writer.hpp"

namespace datastates {

/// Copies sources into cache blocks: eager ones in the caller's thread, lazy ones in a thread of
/// its own, jobs in the order of submission, extents in file order.
///
/// Why this cannot deadlock, down to a cache of one block: a filled extent needs only the writer,
/// which needs no block. A block that is held half filled (eager pieces in, lazy ones not) is
/// completed before anything that needs a new block, also when the thread is already waiting for
/// one. A caller that waits for a block for its eager extents holds none.
class Capturer {
  public:
    Capturer(HostCache& cache, CopyEngines& engines, Writer& writer);
    /// REQUIRES: every job is quiescent.
    ~Capturer() = default;
    Capturer(const Capturer&) = delete;
    Capturer& operator=(const Capturer&) = delete;
    Capturer(Capturer&&) = delete;
    Capturer& operator=(Capturer&&) = delete;

    /// In the caller's thread: takes fingerprints, marks the producers' streams, captures the eager
    /// sources, and queues the rest. An error fails the job and is thrown. Thread-safe.
    void start(const std::shared_ptr<WriteState>& job);

    /// Looks at once for jobs that were stopped. Thread-safe.
    void attend();

  private:
    enum class Pick : std::uint8_t { all, eager, lazy };
    struct Pending {
        std::shared_ptr<WriteState> job;
        std::size_t next_extent = 0;
        std::unique_ptr<CapturedExtent> half_filled;
    };

    void prepare_devices(WriteState& job);
    void take_fingerprints(WriteState& job);
    std::optional<Pending> stage_eager(const std::shared_ptr<WriteState>& job);
    void run(const std::stop_token& stop);
    Pending* next(const std::stop_token& stop);
    void advance(Pending& pending, const std::stop_token& stop);
    void remove(const Pending& pending);
    static void fill(CapturedExtent& captured, Pick pick);
    static void copy_host(WriteState& job, const WritePlan::Piece& piece, std::byte* to);
    void hand_over(std::unique_ptr<CapturedExtent> captured);

    HostCache& cache_;
    CopyEngines& engines_;
    Writer& writer_;
    std::mutex mutex_;
    std::condition_variable_any queued_;
    std::list<Pending> queue_;
    std::atomic<bool> attention_ = false;
    std::jthread thread_;  // last: joins first
};

}  // namespace datastates
