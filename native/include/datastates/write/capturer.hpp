#pragma once

#include <atomic>
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
#include <utility>

#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/device_cache.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/write/write_state.hpp"
#include "datastates/write/writer.hpp"

namespace datastates {

/// Has sources copied into cache blocks: eager ones in the caller's thread, lazy ones begun in a
/// thread of its own, jobs in the order of submission, extents in file order. Lazy ones of host
/// memory are copied by workers, several extents at a time, where there are enough of them.
///
/// Why this cannot deadlock, down to a cache of one block: a filled extent needs only the writer,
/// which needs no block. A block that is held half filled (eager pieces in, lazy ones not) is
/// completed before anything that needs a new block, also when the thread is already waiting for
/// one. A caller that waits for a block for its eager extents holds none.
class Capturer {
  public:
    /// `shallow`: enqueue only as many device copies as keep the bus busy, so that a gate finds
    /// little that is under way; else as many as there are blocks.
    Capturer(HostCache& cache, CopyEngines& engines, Writer& writer, bool shallow);
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
    static void copy_devices(CapturedExtent& captured, Pick pick,
                             const std::shared_ptr<DeviceImage>& image);
    bool bus_is_full();
    void watch_bus(const CapturedExtent& captured);
    void hand_over(std::unique_ptr<CapturedExtent> captured, std::uint32_t track);

    HostCache& cache_;
    CopyEngines& engines_;
    Writer& writer_;
    const bool shallow_;
    // The thread's own: extents on their way from a device, until their event has passed.
    std::deque<std::pair<std::weak_ptr<Event>, std::uint64_t>> on_bus_;
    std::uint64_t bytes_on_bus_ = 0;
    std::mutex mutex_;
    std::condition_variable_any queued_;
    std::list<Pending> queue_;
    std::atomic<bool> attention_ = false;
    std::jthread thread_;  // last: joins first
};

}  // namespace datastates
