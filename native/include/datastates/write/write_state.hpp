#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "datastates/base/error.hpp"
#include "datastates/base/timeline.hpp"
#include "datastates/checksum/checksum.hpp"
#include "datastates/checksum/digest.hpp"
#include "datastates/io/file.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/plan.hpp"
#include "datastates/write/extent_claims.hpp"

namespace datastates {

struct WriteStats {
    std::uint64_t bytes = 0;
    std::uint64_t extents = 0;
    double capture_seconds = 0;            // from submit to captured
    std::uint64_t device_cache_bytes = 0;  // copied to spare device memory at gates
    double evacuate_seconds = 0;           // time to enqueue those copies
    bool direct = false;
};

/// The state of one write. The job's owner, the capture thread, the workers and the writer share
/// it.
///
/// A mutex guards the progress, the errors and the fingerprints of captured bytes. Digests are
/// atomic. Only the writer adds checksums and the residual, in file order. Submit sets the engines
/// and the first fingerprints before it captures anything. A worker sets the file in create();
/// other threads use it after created(). Waits throw the job's error.
class WriteState {
  public:
    /// `device_cache`: gates may copy extents to spare device memory.
    WriteState(std::shared_ptr<const WritePlan> plan, Buffers buffers, bool device_cache);

    const WritePlan& plan() const { return *plan_; }
    const Buffers& buffers() const { return buffers_; }
    /// Marks the job as begun: it is not quiescent until create() and the capture have ended.
    void begin();
    /// Creates the file, which must not exist, and allocates its space. A failure fails the job. A
    /// worker runs this, so that the caller of submit_write does not wait for the storage.
    /// `by_mapping`: map a file that lives in memory, for stores.
    void create(const std::string& path, bool direct, bool by_mapping, unsigned worker);
    /// Whether the file was created by this job.
    bool made() const;
    /// Whether create() has ended without an error, so that the file is ready for writes.
    bool created() const { return created_.load(std::memory_order_acquire); }
    /// REQUIRES: created().
    File& file() { return *file_; }
    bool memory_backed() const { return created() && file_->memory_backed(); }
    bool on_host(std::size_t source) const { return buffers_.device[source] < 0; }
    bool on_device(const WritePlan::Piece& piece) const {
        return piece.source >= 0 && !on_host(static_cast<std::size_t>(piece.source));
    }

    const std::byte* host_memory(std::size_t source) const {
        return reinterpret_cast<const std::byte*>(buffers_.address[source]);
    }

    // Captured bytes.
    /// Adds a fragment's checksum, in the order of the source's bytes. Only for the writer.
    void checksum(std::size_t source, const CrcFragment& fragment);
    /// A sweep that folds a piece's bytes into their digests. Any thread may make one.
    DigestSweep sweep(const WritePlan::Piece& piece) {
        return {plan_->digest_runs(static_cast<std::size_t>(piece.source)), piece.source_offset,
                digests_};
    }
    /// Adds the fingerprint of a captured piece of a host source. Thread-safe.
    void fingerprint(const WritePlan::Piece& piece, const std::byte* data);
    /// Whether a piece's device memory is still mapped; `known` as for cuda::is_mapped.
    bool has_memory(const WritePlan::Piece& piece, std::uint64_t& known) const;
    /// Marks a source as torn: its owner has unmapped some of its memory. Thread-safe.
    void lose(std::int32_t source);
    /// The fingerprints of the extent's pieces of device sources, in order; for extent_landed.
    /// `memory` holds the extent.
    std::vector<std::uint64_t> device_fingerprints(const WritePlan::Extent& extent,
                                                   const std::byte* memory) const;
    std::uint32_t source_crc(std::size_t source) const { return source_crcs_[source].value(); }
    /// Keeps the last extent's bytes beyond a multiple of 4096; `finish` writes them with the tail.
    void keep_residual(std::span<const std::byte> data) {
        residual_.assign(data.begin(), data.end());
    }

    // Called in submit_write, before the capture thread knows the job.
    void add_engine(int device, std::shared_ptr<CopyEngine> engine);
    CopyEngine& engine(int device) const { return *engines_.at(device); }
    void set_fingerprint_before(std::size_t source, std::uint64_t value);
    void add_fingerprints_before(DeviceFingerprints values, std::vector<std::size_t> sources);
    void add_producer(int device, std::shared_ptr<Event> event);
    /// Makes `stream` wait for the producers of the device's lazy sources.
    void order_after_producers(int device, cuda::StreamHandle stream) const;
    /// Does this for the capture streams of all devices. The capture thread calls it before each
    /// extent; only the first call does anything.
    void order_captures_after_producers();

    /// Decides who copies which extent.
    ExtentClaims& claims() const { return claims_; }
    /// The device of an extent that a gate may take.
    int device_of(std::size_t extent) const;

    // Progress. Thread-safe.
    /// Notes an event behind copies from `device`. Lazy copies share a stream, so only the last
    /// event of these is kept.
    void add_capture_event(int device, std::shared_ptr<Event> event, bool lazy);
    /// The extent is handed over: its device copies are enqueued. `host_later`: its host bytes are
    /// copied only at extent_copied.
    void extent_enqueued(std::size_t extent, bool host_later);
    void extent_copied();
    /// The extent's copy to spare memory of `device` is enqueued; `ready` is behind it.
    void extent_evacuated(std::size_t extent, int device, std::shared_ptr<Event> ready);
    void add_evacuate_seconds(double seconds);
    /// All bytes of the extent's sources are in its block.
    void extent_landed(const WritePlan::Extent& extent,
                       std::span<const std::uint64_t> device_fingerprints);
    /// The extent's checksums are added.
    void extent_checksummed();
    /// The extent is written or dropped, and its block is given back.
    void extent_retired();
    /// The capture thread will touch neither the job nor the sources again.
    void end_capture();
    /// Adds a wait for a block that ends now.
    void add_cache_wait(double seconds);
    Timeline& timeline() { return timeline_; }
    const Timeline& timeline() const { return timeline_; }
    /// Stops the job: nothing new begins. The first error is kept.
    void fail(const Error& error);
    bool stopped() const { return stopped_.load(std::memory_order_acquire); }

    // For the job's owner; see WriteJob. Without a deadline waits take for ever; false means that
    // it passed. Thread-safe.
    using Deadline = std::optional<Clock::time_point>;
    bool wait_made(Deadline deadline) const;
    bool wait_captured(Deadline deadline) const;
    bool wait_checksummed(Deadline deadline) const;
    bool wait_written(Deadline deadline) const;
    bool gate(std::span<const std::pair<int, std::uint64_t>> streams, Deadline deadline) const;
    /// Waits until no thread and no device uses the job.
    void wait_quiescent() const;
    bool captured() const;
    bool checksummed() const;
    bool written() const;
    bool quiescent() const;
    std::vector<int> torn() const;
    std::span<const std::uint32_t> chunk_crcs() const { return chunk_crcs_; }
    std::vector<std::uint32_t> digests() const { return {digests_.begin(), digests_.end()}; }
    void finish(std::span<const std::byte> tail);
    /// Closes the file of a job that was not finished. REQUIRES: quiescent.
    void abandon();
    WriteStats stats() const;

  private:
    struct DeviceCapture {
        std::vector<std::shared_ptr<Event>> eager;
        std::shared_ptr<Event> lazy;
        std::shared_ptr<Event> evacuated;
    };
    struct Before {
        DeviceFingerprints values;
        std::vector<std::size_t> sources;
    };

    bool wait(std::unique_lock<std::mutex>& lock, Deadline deadline, const bool& done) const;
    bool quiescent_locked() const { return !creating_ && !capturing_ && retired_ == enqueued_; }
    std::uint64_t fingerprint_of(const WritePlan::Piece& piece, const std::byte* data) const;
    void settle_locked();
    bool allocate_memory(const File& file) const;
    void compare_fingerprints_locked();

    const std::shared_ptr<const WritePlan> plan_;
    const Buffers buffers_;
    std::unique_ptr<File> file_;  // only create() uses it while creating_
    std::atomic<bool> created_ = false;
    const Clock::time_point start_ = Clock::now();
    std::map<int, std::shared_ptr<CopyEngine>> engines_;
    std::vector<std::pair<int, std::shared_ptr<Event>>> producers_;
    bool captures_ordered_ = false;  // only for the capture thread
    mutable ExtentClaims claims_;
    std::vector<ChunkedCrc32> source_crcs_;
    std::vector<std::uint32_t> chunk_crcs_;
    std::vector<std::atomic<std::uint32_t>> digests_;  // one for each digest of the plan
    std::vector<std::uint64_t> before_;                // fingerprints at submit
    std::vector<Before> device_before_;                // moved to before_ once captured
    std::vector<std::uint64_t> after_;                 // fingerprints of what was captured
    std::vector<std::byte> residual_;
    std::atomic<bool> stopped_ = false;

    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::map<int, DeviceCapture> capture_events_;
    std::size_t enqueued_ = 0;
    std::size_t source_extents_enqueued_ = 0;  // or evacuated; host bytes copied
    std::size_t copying_ = 0;                  // extents whose host bytes are not yet copied
    std::size_t landed_ = 0;
    std::size_t extents_checksummed_ = 0;
    std::size_t retired_ = 0;
    bool made_ = false;
    bool creating_ = false;
    bool capturing_ = false;
    bool captured_ = false;
    bool checksummed_ = false;
    bool written_ = false;
    bool closed_ = false;
    std::optional<Error> error_;
    std::set<int> lost_;  // sources
    std::vector<int> torn_;
    WriteStats stats_;
    Timeline timeline_;
    std::mutex finish_mutex_;  // one finish or abandon at a time
};

}  // namespace datastates
