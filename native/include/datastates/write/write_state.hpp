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
    double capture_seconds = 0;            // from submit_write to captured
    std::uint64_t device_cache_bytes = 0;  // copied to spare device memory at a gate
    double evacuate_seconds = 0;           // enqueueing those copies
    bool direct = false;
};

/// What the threads share about one write. Sources' checksums and fingerprints belong to the thread
/// that holds the extent at hand (extents are handed over in order, and a source's bytes are
/// checksummed by one thread only); everything else is guarded here.
class WriteState {
  public:
    /// `device_cache`: whether gates may copy extents to spare device memory.
    WriteState(std::shared_ptr<const WritePlan> plan, Buffers buffers, bool device_cache);

    const WritePlan& plan() const { return *plan_; }
    const Buffers& buffers() const { return buffers_; }
    /// From now on the job is not quiescent before create() and the capture have ended.
    void begin();
    /// Makes the file, which must not exist, and room for it; fails the job where it cannot. In a
    /// worker: the caller of submit_write does not wait for the storage. `by_mapping`: one that
    /// lives in memory will be stored into.
    void create(const std::string& path, bool direct, bool by_mapping, unsigned worker);
    /// Whether the file was made.
    bool made() const;
    /// Whether there is also room for it.
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

    // Captured bytes. The writer's, in the order of each source's bytes.
    void checksum(std::size_t source, const CrcFragment& fragment);
    /// For the digests that a piece's bytes are part of.
    DigestSweep sweep(const WritePlan::Piece& piece) {
        return {plan_->digest_runs(static_cast<std::size_t>(piece.source)), piece.source_offset,
                digests_};
    }
    /// Of a host source, as it was captured. Any thread's.
    void fingerprint(const WritePlan::Piece& piece, const std::byte* data);
    /// Whether a device source's bytes are still there; `known` as for cuda::is_mapped.
    bool has_memory(const WritePlan::Piece& piece, std::uint64_t& known) const;
    /// Some of its memory could not be read: its owner has given it back. Any thread's.
    void lose(std::int32_t source);
    /// Of all device sources' pieces, in their order, when `memory` holds the extent; for
    /// extent_landed.
    std::vector<std::uint64_t> device_fingerprints(const WritePlan::Extent& extent,
                                                   const std::byte* memory) const;
    std::uint32_t source_crc(std::size_t source) const { return source_crcs_[source].value(); }
    /// The last extent's bytes beyond a multiple of 4096; `finish` writes them before the tail.
    void keep_residual(std::span<const std::byte> data) {
        residual_.assign(data.begin(), data.end());
    }

    // Set up by submit, in the caller's thread, before any other thread knows the job.
    void add_engine(int device, std::shared_ptr<CopyEngine> engine);
    CopyEngine& engine(int device) const { return *engines_.at(device); }
    void set_fingerprint_before(std::size_t source, std::uint64_t value);
    void add_fingerprints_before(DeviceFingerprints values, std::vector<std::size_t> sources);
    void add_producer(int device, std::shared_ptr<Event> event);
    /// Lets a stream of ours wait for the producers of a device's lazy sources.
    void order_after_producers(int device, cuda::StreamHandle stream) const;
    /// The same for all devices' capture streams. Called by the capture thread before each extent;
    /// does its work once.
    void order_captures_after_producers();

    /// Who copies which extent.
    ExtentClaims& claims() const { return claims_; }
    /// The device of an extent that a gate may take.
    int device_of(std::size_t extent) const;

    // Progress.
    /// Copies of `device` were enqueued; `lazy` ones replace the event before, being in one stream.
    void add_capture_event(int device, std::shared_ptr<Event> event, bool lazy);
    /// It has its block, and its device bytes are on their way there; `host_later`: its host bytes
    /// are not there before extent_copied.
    void extent_enqueued(std::size_t extent, bool host_later);
    void extent_copied();
    /// Its bytes are on their way to spare memory of `device`, and there behind `ready`.
    void extent_evacuated(std::size_t extent, int device, std::shared_ptr<Event> ready);
    void add_evacuate_seconds(double seconds);
    void extent_landed(const WritePlan::Extent& extent,
                       std::span<const std::uint64_t> device_fingerprints);
    /// The checksums of its bytes are told.
    void extent_checksummed();
    void extent_retired();
    /// The capture thread will touch neither the job nor the sources again.
    void end_capture();
    /// The seconds up to now.
    void add_cache_wait(double seconds);
    Timeline& timeline() { return timeline_; }
    const Timeline& timeline() const { return timeline_; }
    /// The first error stays; nothing new is started after it.
    void fail(const Error& error);
    bool stopped() const { return stopped_.load(std::memory_order_acquire); }

    // For the job's owner. A missing deadline waits for ever; false means it passed.
    using Deadline = std::optional<Clock::time_point>;
    bool wait_made(Deadline deadline) const;
    bool wait_captured(Deadline deadline) const;
    bool wait_checksummed(Deadline deadline) const;
    bool wait_written(Deadline deadline) const;
    bool gate(std::span<const std::pair<int, std::uint64_t>> streams, Deadline deadline) const;
    /// Until no thread and no device touches the job.
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
    std::unique_ptr<File> file_;  // a worker's while creating_
    std::atomic<bool> created_ = false;
    const Clock::time_point start_ = Clock::now();
    std::map<int, std::shared_ptr<CopyEngine>> engines_;
    std::vector<std::pair<int, std::shared_ptr<Event>>> producers_;
    bool captures_ordered_ = false;  // the capture thread's
    mutable ExtentClaims claims_;
    std::vector<ChunkedCrc32> source_crcs_;
    std::vector<std::uint32_t> chunk_crcs_;
    std::vector<std::atomic<std::uint32_t>> digests_;  // the plan's
    std::vector<std::uint64_t> before_;                // fingerprints at submit, host sources
    std::vector<Before> device_before_;
    std::vector<std::uint64_t> after_;  // fingerprints of what was captured
    std::vector<std::byte> residual_;
    std::atomic<bool> stopped_ = false;

    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::map<int, DeviceCapture> capture_events_;
    std::size_t enqueued_ = 0;
    std::size_t source_extents_enqueued_ = 0;  // or evacuated; of host bytes, copied
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
    std::mutex finish_mutex_;  // one finish or close at a time
};

}  // namespace datastates
