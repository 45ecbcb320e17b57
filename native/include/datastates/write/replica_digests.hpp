#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/job_devices.hpp"

namespace datastates {

/// Where the arrays lie that several ranks hold alike: columns with one entry for each range of
/// memory. Immutable, so many snapshots share it.
struct ReplicaRanges {
    std::vector<std::int32_t> device;   // CUDA ordinal, -1: host
    std::vector<std::uint64_t> stream;  // CUstream that produced it
    std::vector<std::uint64_t> nbytes;
    std::vector<std::uint64_t> position;  // of the range's first word in its digest
    std::vector<std::uint32_t> digest;    // the digest that the range belongs to
    std::vector<std::uint8_t> eager;      // 1: it may change once submit returns
    std::size_t digests = 0;

    /// Throws Error "invalid" for columns that disagree.
    void validate() const;
};

/// The memory of one snapshot's replicas: the ranges, and the address of each. Without ranges,
/// nothing is compared.
struct Replicas {
    std::shared_ptr<const ReplicaRanges> ranges{};
    std::vector<std::uint64_t> addresses{};
};

/// Takes digests of arrays that several ranks hold, as they were at submit, whether or not this job
/// writes them. A digest is the sum of the whole fingerprints of its ranges. Owned by the
/// WriteState. Thread-safe after begin().
class ReplicaDigests {
  public:
    /// Throws Error "invalid" unless each range has an address.
    explicit ReplicaDigests(Replicas memory);

    /// The devices that ranges lie on.
    std::vector<int> devices() const;
    /// Runs in submit's thread: launches the kernels for device memory on the producers' streams,
    /// and reads eager host memory. Calls `launched` with each device and the event behind its
    /// kernel.
    void begin(const JobDevices& devices,
               const std::function<void(int, std::shared_ptr<Event>)>& launched);
    /// How many workers can read the other host memory at the same time.
    std::size_t tasks() const {
        return batches_.empty() ? 0 : batches_.size() - 1 - eager_batches_;
    }
    /// Reads host memory until nothing is left, or until `stopped`.
    void read(const std::atomic<bool>& stopped);
    /// Whether all host memory is read.
    bool host_done() const { return read_.load(std::memory_order_acquire) == tasks(); }
    /// Whether the kernels have ended. Throws Error "cuda".
    bool passed() const;

    /// Valid once host_done() and passed().
    std::vector<std::uint64_t> digests() const;
    /// Digests of memory that its owner has unmapped.
    std::vector<std::uint32_t> lost() const;

  private:
    struct Piece {
        std::size_t range;
        std::uint64_t offset;
        std::uint64_t nbytes;
    };
    struct Launched {
        DeviceDigests fingerprints;
        std::vector<std::size_t> ranges;
    };

    void cut(bool eager);
    void read_batch(std::size_t batch);
    const std::byte* host(const Piece& piece) const {
        return reinterpret_cast<const std::byte*>(addresses_[piece.range]) + piece.offset;
    }

    const std::shared_ptr<const ReplicaRanges> ranges_;
    const std::vector<std::uint64_t> addresses_;
    std::vector<Piece> pieces_;         // of host memory: the eager ones first
    std::vector<std::size_t> batches_;  // first piece of each batch, and the number of all pieces
    std::size_t eager_batches_ = 0;
    std::vector<Launched> launched_;
    std::vector<std::atomic<std::uint64_t>> sums_;  // by digest
    std::vector<std::atomic<bool>> lost_;
    std::atomic<std::size_t> next_ = 0;  // batch behind the eager ones
    std::atomic<std::size_t> read_ = 0;
};

}  // namespace datastates
