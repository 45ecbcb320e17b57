#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <stop_token>
#include <string_view>
#include <thread>
#include <unordered_map>

#include "datastates/base/timeline.hpp"
#include "datastates/base/unmovable.hpp"
#include "datastates/base/worker_pool.hpp"
#include "datastates/io/io_backend.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/write/captured_extent.hpp"
#include "datastates/write/write_state.hpp"

namespace datastates {

/// Writes captured extents, in a thread that owns the write backend. Owned by the executor.
///
/// An extent passes three states: landing (device copies, or host copies by a worker, under way),
/// ready (its checksums are added and patched in, in order), and in flight (being written). Workers
/// copy host sources, compute the checksums of device sources, and store into files that live in
/// memory; they finish in any order. A mutex guards what other threads hand over.
class Writer : Unmovable {
  public:
    Writer(HostCache& cache, WorkerPool& workers, std::unique_ptr<IoBackend> backend);
    /// Joins the thread. REQUIRES: every job is quiescent.
    ~Writer() = default;

    /// Takes an extent whose device copies are enqueued and whose host sources are copied. With
    /// `host_later` a worker copies the host sources now. Extents of one job must come in file
    /// order. An error fails the job and is not thrown. Thread-safe.
    void hand_over(std::unique_ptr<CapturedExtent> extent);
    /// Whether workers copy host sources. With fewer than four workers they do not: a save would
    /// take longer, as they compete with the storage and the training for the memory.
    bool copies_host() const { return workers_.size() >= kCopyingWorkers; }
    /// Wakes the thread to look again at extents whose file exists by now or whose job has failed.
    /// Thread-safe.
    void look_again();
    std::string_view backend_name() const { return backend_->name(); }

  private:
    static constexpr unsigned kCopyingWorkers = 4;
    /// A list, so that an extent moves from one to the next without allocating memory.
    using Extents = std::list<std::unique_ptr<CapturedExtent>>;
    struct InFlight {
        std::unique_ptr<CapturedExtent> extent;
        IoRequest request;
    };

    void run(const std::stop_token& stop);
    bool take_arrivals(const std::stop_token& stop);
    bool land_next();
    bool next_is_ready() const {
        if (ready_.empty() || ready_.front()->working) return false;
        const WriteState& job = *ready_.front()->job;
        return job.created() || job.stopped();
    }
    /// Whether the thread has to poll the oldest extent's events: no worker will report it.
    bool lands_unseen() const { return !landing_.empty() && !landing_.front()->working; }
    void start_copy(CapturedExtent& captured);
    void start_digest(CapturedExtent& captured);
    void give_back(CapturedExtent& captured);
    void process_next();
    static void patch(const CapturedExtent& captured);
    void write(std::unique_ptr<CapturedExtent>& captured);
    void start_store(const IoRequest& request);
    void reap(bool wait);
    void complete(const IoCompletion& completion);

    HostCache& cache_;
    WorkerPool& workers_;
    std::unique_ptr<IoBackend> backend_;
    std::mutex mutex_;
    std::condition_variable_any arrived_;
    Extents arrivals_;
    std::list<IoCompletion> stored_;  // by workers
    bool look_again_ = false;
    // Used by the thread only.
    Extents landing_;
    Extents ready_;
    std::unordered_map<std::uint64_t, InFlight> in_flight_;
    std::uint64_t next_token_ = 0;
    Clock::time_point landed_;  // when the last device copies landed
    std::jthread thread_;       // last: joins first
};

}  // namespace datastates
