#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "datastates/copy_engine.hpp"
#include "datastates/host_cache.hpp"
#include "datastates/io_backend.hpp"
#include "datastates/write_state.hpp"

namespace datastates {

/// An extent on its way from the capture to the file.
struct CapturedExtent {
    CapturedExtent(std::shared_ptr<WriteState> state, std::size_t extent_index, Block cache_block)
        : job(std::move(state)), index(extent_index), block(std::move(cache_block)) {}
    /// The block goes back when no device writes into it any more.
    ~CapturedExtent() {
        for (const auto& event : events) event->synchronize();
    }
    CapturedExtent(const CapturedExtent&) = delete;
    CapturedExtent& operator=(const CapturedExtent&) = delete;
    CapturedExtent(CapturedExtent&&) = delete;
    CapturedExtent& operator=(CapturedExtent&&) = delete;

    const WritePlan::Extent& extent() const { return job->plan().extents()[index]; }

    std::shared_ptr<WriteState> job;
    std::size_t index;
    Block block;
    std::vector<std::shared_ptr<Event>> events;  // of the device copies under way
};

/// The thread that owns the write backend. Extents go through three states here, in order: landing
/// (device copies under way) → ready (checksums, patches) → in flight (being written).
class Writer {
  public:
    Writer(HostCache& cache, std::unique_ptr<IoBackend> backend);
    /// REQUIRES: every job is quiescent.
    ~Writer() = default;
    Writer(const Writer&) = delete;
    Writer& operator=(const Writer&) = delete;
    Writer(Writer&&) = delete;
    Writer& operator=(Writer&&) = delete;

    /// Takes a filled extent. Extents of one job must come in file order. Thread-safe.
    void hand_over(std::unique_ptr<CapturedExtent> extent);
    std::string_view backend_name() const { return backend_->name(); }

  private:
    struct InFlight {
        std::unique_ptr<CapturedExtent> extent;
        IoRequest request;
    };

    void run(const std::stop_token& stop);
    bool take_arrivals(const std::stop_token& stop);
    bool land_next();
    void process_next();
    void digest_and_patch(const CapturedExtent& captured) const;
    void write(std::unique_ptr<CapturedExtent> captured);
    void reap(bool wait);
    static void retire(std::unique_ptr<CapturedExtent> extent);

    HostCache& cache_;
    std::unique_ptr<IoBackend> backend_;
    std::mutex mutex_;
    std::condition_variable_any arrived_;
    std::deque<std::unique_ptr<CapturedExtent>> arrivals_;
    // The thread's own.
    std::deque<std::unique_ptr<CapturedExtent>> landing_;
    std::deque<std::unique_ptr<CapturedExtent>> ready_;
    std::unordered_map<std::uint64_t, InFlight> in_flight_;
    std::uint64_t next_token_ = 0;
    std::atomic<bool> populated_ = false;
    // Backs the cache with memory beside everybody: early blocks are usable meanwhile.
    std::jthread populator_;
    std::jthread thread_;  // last: joins first
};

}  // namespace datastates
