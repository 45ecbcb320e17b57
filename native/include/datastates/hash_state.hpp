#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "datastates/base/deadline.hpp"
#include "datastates/base/error.hpp"
#include "datastates/checksum/hash.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/job_devices.hpp"
#include "datastates/plan.hpp"

namespace datastates {

/// The state of one hash job: the chunks of all its sources, and their hashes. The job's owner and
/// the workers share it. Thread-safe after launch() and begin(), in this order.
class HashState {
  public:
    /// Throws Error "invalid" for columns that disagree.
    HashState(const std::vector<std::uint64_t>& nbytes, const Buffers& sources);

    /// How many workers can hash host memory at the same time.
    std::size_t tasks() const;
    /// Tells how many calls of hash_host() there will be.
    void begin(std::size_t calls) { calls_ = calls; }
    /// Enqueues a kernel on each device, behind the work that is on the sources' streams now. Runs
    /// in submit's thread. Throws Error "cuda".
    void launch(CopyEngines& engines);
    /// Hashes host memory until nothing is left, or until stop(). Runs in a worker.
    void hash_host();

    /// Lets no further host memory be read: nobody will ask for the hashes.
    void stop() { stopped_.store(true, std::memory_order_release); }
    /// Waits until nothing reads a source. Then throws Error "cuda" where a device has failed.
    /// False when the deadline passes first.
    bool wait(Deadline deadline) const;
    /// Waits until nothing reads a source; does not throw.
    void wait_done() const;
    /// The hashes of all chunks, end to end. Valid once wait() has returned true.
    std::vector<std::byte> hashes() const;
    /// The sources that are unmapped in part, ascending; they have no valid hashes. Valid as above.
    std::vector<std::size_t> lost() const;

  private:
    struct Range {
        int device;
        cuda::DevicePointer address;
        std::uint64_t nbytes;
        std::size_t source;
    };
    void hash_chunks();
    std::size_t source_of(std::size_t chunk) const;

    std::vector<Range> on_devices_;
    std::set<std::pair<int, std::uint64_t>> streams_;  // that device memory comes from
    std::vector<hash::DeviceChunk> chunks_;
    std::vector<std::size_t> first_chunk_;            // of each source
    std::map<int, std::vector<std::size_t>> places_;  // chunks by device; -1: host
    std::vector<hash::Hash> hashes_;                  // of chunks in host memory
    JobDevices devices_;
    std::map<int, DeviceHashes> launched_;
    std::atomic<std::size_t> next_ = 0;  // of the host's chunks
    std::atomic<bool> stopped_ = false;
    mutable std::mutex mutex_;
    mutable std::condition_variable ended_;
    std::size_t calls_ = 0;         // of hash_host() that have not ended
    std::optional<Error> failure_;  // the first of hash_host()
    std::set<std::size_t> lost_;
};

}  // namespace datastates
