#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "datastates/device_cache.hpp"
#include "datastates/write_state.hpp"

namespace datastates {

/// Frees a training step from waiting for the bus: what a job has not begun to capture when its
/// gate is reached is copied to spare device memory, which takes milliseconds, and captured from
/// there afterwards. Thread-safe.
class Evacuator {
  public:
    /// 256 MiB in extents of 8: few allocations, each given back soon.
    static constexpr std::uint64_t kExtentsPerSlab = 32;

    /// At most `device_cache_bytes` of each device; 0: never.
    explicit Evacuator(std::uint64_t device_cache_bytes) : cache_(device_cache_bytes) {}

    bool enabled() const { return cache_.enabled(); }
    /// Enqueues the copies, as far as there is room. An error fails the job.
    void evacuate(WriteState& job);

  private:
    /// One device, during one evacuation.
    struct Place {
        std::shared_ptr<DevicePool> pool;
        std::uint64_t room = 0;
        std::shared_ptr<DeviceSlab> slab;  // the one that images are taken from
    };

    bool evacuate_what_fits(WriteState& job);
    Place open(const WriteState& job, int device);
    static std::shared_ptr<DeviceImage> image(const WriteState& job, std::uint64_t bytes,
                                              Place& place);
    static std::shared_ptr<DeviceImage> copy(const WriteState& job, std::size_t index, int device,
                                             Place& place);

    DeviceCache cache_;
    std::mutex mutex_;  // one at a time: they share the room
};

}  // namespace datastates
