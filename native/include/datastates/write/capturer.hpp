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

#include "datastates/base/unmovable.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/device_cache.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/write/write_state.hpp"
#include "datastates/write/writer.hpp"

namespace datastates {

/// Copies sources into cache blocks; owned by the executor. The caller of submit_write copies eager
/// sources. The capture thread then begins the lazy ones: jobs in the order of submission, extents
/// in file order. If there are enough workers, they copy lazy sources in host memory, several
/// extents at a time.
///
/// This cannot deadlock, even with a single block:
/// - A filled extent needs only the writer, which needs no block.
/// - A half-filled block holds eager pieces and waits for lazy ones. The capture thread completes
///   it before it takes a new block, and stops waiting for a block to do so.
/// - A caller that waits for a block for its eager extents holds no block.
class Capturer : Unmovable {
  public:
    /// `shallow`: enqueue only as many device copies as keep the bus busy, so that a gate has to
    /// wait for few. Otherwise enqueue as many as there are blocks.
    Capturer(HostCache& cache, CopyEngines& engines, Writer& writer, bool shallow);
    /// Joins the thread. REQUIRES: every job is quiescent.
    ~Capturer() = default;

    /// Runs in the caller's thread. Takes fingerprints, records events on the producers' streams,
    /// captures the eager sources, and queues the rest. An error fails the job and is thrown.
    /// Thread-safe.
    void start(const std::shared_ptr<WriteState>& job);

    /// Makes the capture thread look for stopped and half-filled jobs at once. Thread-safe.
    void attend();

  private:
    struct Pending {
        std::shared_ptr<WriteState> job;
        std::size_t next_extent = 0;
        std::unique_ptr<CapturedExtent> half_filled;
        bool ordered = false;                          // its capture streams wait for its producers
        std::optional<std::size_t> last_of_devices{};  // extent: behind it, see look_again
    };

    void prepare_devices(WriteState& job);
    void take_fingerprints(WriteState& job);
    std::optional<Pending> stage_eager(const std::shared_ptr<WriteState>& job);
    void run(const std::stop_token& stop);
    Pending* next(const std::stop_token& stop);
    void advance(Pending& pending, const std::stop_token& stop);
    static void order_captures(Pending& pending);
    void remove(const Pending& pending);
    static void copy_devices(CapturedExtent& captured, Pick pick,
                             const std::shared_ptr<DeviceImage>& image);
    static void look_again(const Pending& pending, CapturedExtent& captured);
    bool bus_is_full();
    void watch_bus(const CapturedExtent& captured);
    void hand_over(std::unique_ptr<CapturedExtent> captured, std::uint32_t track);

    HostCache& cache_;
    CopyEngines& engines_;
    Writer& writer_;
    const bool shallow_;
    // Used by the capture thread only: extents whose device copies are under way.
    std::deque<std::pair<std::weak_ptr<Event>, std::uint64_t>> on_bus_;
    std::uint64_t bytes_on_bus_ = 0;
    std::mutex mutex_;
    std::condition_variable_any queued_;
    std::list<Pending> queue_;
    std::atomic<bool> attention_ = false;
    std::jthread thread_;  // last: joins first
};

}  // namespace datastates
