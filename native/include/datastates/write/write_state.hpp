#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "datastates/base/deadline.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/timeline.hpp"
#include "datastates/memory/job_devices.hpp"
#include "datastates/plan.hpp"
#include "datastates/write/capture_events.hpp"
#include "datastates/write/extent_claims.hpp"
#include "datastates/write/new_file.hpp"
#include "datastates/write/outlet.hpp"
#include "datastates/write/replica_digests.hpp"
#include "datastates/write/source_checksums.hpp"
#include "datastates/write/witness.hpp"

namespace datastates {

struct WriteStats {
    std::uint64_t bytes = 0;
    std::uint64_t extents = 0;
    double capture_seconds = 0;            // from submit to captured
    std::uint64_t device_cache_bytes = 0;  // copied to spare device memory at gates
    double evacuate_seconds = 0;           // time to enqueue those copies
    bool direct = false;
};

/// How far a write is, and why it failed. The job's owner, the capture thread, the workers and the
/// writer share it, and with it the parts of the job that it owns.
///
/// A mutex guards the progress, the error and the capture events. A worker makes the file in
/// create(); other threads use it after created(). Waits throw the job's error.
class WriteState {
  public:
    /// `device_cache`: gates may copy extents to spare device memory.
    WriteState(std::shared_ptr<const WritePlan> plan, Buffers buffers, Replicas replicas,
               bool device_cache);

    const WritePlan& plan() const { return *plan_; }
    const Buffers& buffers() const { return buffers_; }
    JobDevices& devices() { return devices_; }
    /// Decides who copies which extent.
    ExtentClaims& claims() { return claims_; }
    Witness& witness() { return witness_; }
    SourceChecksums& checksums() { return checksums_; }
    ReplicaDigests& replicas() { return replicas_; }
    Timeline& timeline() { return timeline_; }
    /// REQUIRES: created(), without an outlet.
    NewFile& file() { return file_; }
    /// Who makes the file, if it is handed over. REQUIRES: created().
    Outlet* outlet() const { return outlet_.get(); }
    /// The device of an extent's first source; -1: host memory.
    int device_of(std::size_t extent) const;
    /// Whether a piece's device memory is still mapped. If not, its source is torn. `known` as for
    /// cuda::is_mapped.
    bool has_memory(const WritePlan::Piece& piece, cuda::Mapping& known);

    // Progress. Thread-safe.
    /// Marks the job as begun: it is not quiescent until the capture and `readers` calls of
    /// read_replicas() have ended.
    void begin(std::size_t readers);
    /// In a worker: reads the host memory of replicas, with the other workers that do so.
    void read_replicas();
    /// Call once before create(): the job is not quiescent until that has ended, either.
    void begin_to_create();
    /// Creates the file, which must not exist, and allocates its space. A failure fails the job. A
    /// worker runs this.
    /// `by_mapping`: map a file that lives in memory, for stores.
    void create(const std::string& path, bool direct, bool by_mapping, unsigned worker);
    /// Hands the file over from now on, instead of creating it; call begin_to_create() before.
    void hand_to(std::shared_ptr<Outlet> outlet, const std::shared_ptr<WriteState>& self);
    /// The file that was handed over is made.
    void end_handing();
    /// As CaptureEvents::add.
    void add_capture_event(int device, std::shared_ptr<Event> event, bool lazy);
    /// The extent is handed over: its device copies are enqueued. `host_later`: its host bytes are
    /// copied only at extent_copied.
    void extent_enqueued(std::size_t extent, bool host_later);
    void extent_copied();
    /// The extent's copy to spare memory of `device` is enqueued; `ready` is behind it.
    void extent_evacuated(std::size_t extent, int device, std::shared_ptr<Event> ready);
    void add_evacuate_seconds(double seconds);
    /// Behind the copies of all lazy device sources, which are enqueued: the witness reads that
    /// memory again, at the first call. Returns the events behind that, for which gates wait, too.
    /// An error fails the job.
    std::vector<std::shared_ptr<Event>> read_devices_again();
    /// All bytes of the extent's sources are in its block, and the witness has them.
    void extent_landed() { count(landed_); }
    /// The extent's checksums are added.
    void extent_checksummed() { count(extents_checksummed_); }
    /// The extent is written or dropped, and its block is given back.
    void extent_retired() { count(retired_); }
    /// The capture thread will touch neither the job nor the sources again.
    void end_capture();
    /// Stops the job: nothing new begins. The first error is kept.
    void fail(const Error& error);
    bool stopped() const { return stopped_.load(std::memory_order_acquire); }
    /// Whether create() has ended without an error, so that the file is ready for writes.
    bool created() const { return created_.load(std::memory_order_acquire); }
    bool memory_backed() const { return created() && !outlet_ && file_.file().traits().in_memory; }

    // For the job's owner; see WriteJob. Thread-safe.
    /// Whether this job has created its file, or has begun to hand it over.
    bool made() const { return is(made_); }
    bool captured() const { return is(captured_); }
    bool checksummed() const { return is(checksummed_); }
    bool written() const { return is(written_); }
    bool wait_made(Deadline deadline) const { return wait(made_, deadline); }
    bool wait_captured(Deadline deadline) const;
    bool wait_checksummed(Deadline deadline) const { return wait(checksummed_, deadline); }
    bool wait_written(Deadline deadline) const { return wait(written_, deadline); }
    bool gate(std::span<const std::pair<int, std::uint64_t>> streams, Deadline deadline);
    /// Waits until no thread and no device uses the job.
    void wait_quiescent() const;
    bool quiescent() const;
    std::vector<int> torn() const;
    const ReplicaDigests& replicas() const { return replicas_; }
    /// Hands over the end of a file that is handed over. It is not written() before.
    void hand_end(std::span<const std::byte> tail);
    void finish(std::span<const std::byte> tail);
    /// Closes the file of a job that was not finished. REQUIRES: quiescent.
    void abandon();
    WriteStats stats() const;

  private:
    bool is(const bool& reached) const;
    bool wait(const bool& reached, Deadline deadline) const;
    void count(std::size_t& extents);
    bool quiescent_locked() const {
        return !creating_ && !capturing_ && reading_ == 0 && retired_ == enqueued_;
    }
    void settle_locked();

    const std::shared_ptr<const WritePlan> plan_;
    const Buffers buffers_;
    const Clock::time_point start_ = Clock::now();
    JobDevices devices_;
    ExtentClaims claims_;
    Witness witness_;
    SourceChecksums checksums_;
    ReplicaDigests replicas_;
    NewFile file_;  // only create() uses it while creating_
    std::shared_ptr<Outlet> outlet_;
    Timeline timeline_;
    std::atomic<bool> created_ = false;
    std::atomic<bool> stopped_ = false;

    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    CaptureEvents capture_events_;
    std::size_t enqueued_ = 0;
    std::size_t source_extents_enqueued_ = 0;  // or evacuated; host bytes copied
    std::size_t copying_ = 0;                  // extents whose host bytes are not yet copied
    std::size_t reading_ = 0;                  // workers that read replicas
    std::size_t landed_ = 0;
    std::size_t extents_checksummed_ = 0;
    std::size_t retired_ = 0;
    bool made_ = false;
    bool begun_ = false;  // to create the file
    bool creating_ = false;
    bool handing_ = false;  // to the outlet, which has not made the file yet
    bool capturing_ = false;
    bool captured_ = false;
    bool checksummed_ = false;
    bool written_ = false;
    bool closed_ = false;
    std::optional<Error> error_;
    std::vector<int> torn_;
    WriteStats stats_;
    std::mutex finish_mutex_;  // one finish or abandon at a time
    std::mutex again_mutex_;   // one read_devices_again at a time
    bool read_again_ = false;
};

}  // namespace datastates
