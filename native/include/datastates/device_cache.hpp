#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "datastates/copy_engine.hpp"

namespace datastates {

/// How much more of a device's memory may be taken: `limit` in all, of which `used` is taken, and
/// out of what is `free` all but 1 GiB or a twentieth of the device, whichever is more: the
/// training may be about to ask for it.
std::uint64_t device_room(std::uint64_t limit, std::uint64_t used, std::uint64_t free,
                          std::uint64_t total);

class DevicePool;

/// Spare device memory for several images: allocating takes far longer than filling it. Given back
/// when the last of them goes. One thread at a time takes from it.
class DeviceSlab {
  public:
    DeviceSlab(std::shared_ptr<DevicePool> pool, cuda::DevicePointer pointer, std::uint64_t bytes)
        : pool_(std::move(pool)), pointer_(pointer), bytes_(bytes) {}
    ~DeviceSlab();
    DeviceSlab(const DeviceSlab&) = delete;
    DeviceSlab& operator=(const DeviceSlab&) = delete;
    DeviceSlab(DeviceSlab&&) = delete;
    DeviceSlab& operator=(DeviceSlab&&) = delete;

    std::uint64_t bytes() const { return bytes_; }
    /// What it takes of a slab: whole pages.
    static std::uint64_t rounded(std::uint64_t bytes);
    /// Aligned to pages; empty when there is no room for it.
    std::optional<cuda::DevicePointer> take(std::uint64_t bytes);

  private:
    std::shared_ptr<DevicePool> pool_;
    cuda::DevicePointer pointer_;
    std::uint64_t bytes_;
    std::uint64_t taken_ = 0;
};

/// A part of a slab that holds an extent's device bytes, at their places in the extent. When it
/// goes, it waits until nothing is being copied into it; what copies out of it keeps it.
class DeviceImage {
  public:
    DeviceImage(std::shared_ptr<DeviceSlab> slab, cuda::DevicePointer pointer)
        : slab_(std::move(slab)), pointer_(pointer) {}
    ~DeviceImage();
    DeviceImage(const DeviceImage&) = delete;
    DeviceImage& operator=(const DeviceImage&) = delete;
    DeviceImage(DeviceImage&&) = delete;
    DeviceImage& operator=(DeviceImage&&) = delete;

    cuda::DevicePointer pointer() const { return pointer_; }
    /// Behind the copies into it. Set before anybody else sees the image.
    void set_ready(std::shared_ptr<Event> event) { ready_ = std::move(event); }
    const std::shared_ptr<Event>& ready() const { return ready_; }

  private:
    std::shared_ptr<DeviceSlab> slab_;
    cuda::DevicePointer pointer_;
    std::shared_ptr<Event> ready_;
};

/// Slabs on one device, out of a memory pool of our own, which gives back to the device what it
/// does not need. Thread-safe.
class DevicePool : public std::enable_shared_from_this<DevicePool> {
  public:
    /// Throws Error "cuda" where the device or its driver has no pools.
    DevicePool(std::shared_ptr<CopyEngine> engine, std::uint64_t limit);
    ~DevicePool();
    DevicePool(const DevicePool&) = delete;
    DevicePool& operator=(const DevicePool&) = delete;
    DevicePool(DevicePool&&) = delete;
    DevicePool& operator=(DevicePool&&) = delete;

    /// How much there is to be had now. Asks the driver: once for many slabs.
    std::uint64_t room() const;
    /// Usable in the order of the engine's evacuation stream. Null when the device has none.
    std::shared_ptr<DeviceSlab> allocate(std::uint64_t bytes);

  private:
    friend class DeviceSlab;
    void release(cuda::DevicePointer pointer, std::uint64_t bytes);

    const std::shared_ptr<CopyEngine> engine_;
    const std::uint64_t limit_;
    cuda::PoolHandle pool_ = nullptr;
    mutable std::mutex mutex_;
    std::uint64_t used_ = 0;
};

/// The pools of the devices met so far. Thread-safe.
class DeviceCache {
  public:
    /// At most `limit` bytes of each device; 0: none.
    explicit DeviceCache(std::uint64_t limit) : limit_(limit) {}

    bool enabled() const { return limit_ > 0; }
    /// Null where the device has no pools.
    std::shared_ptr<DevicePool> pool(CopyEngine& engine);

  private:
    const std::uint64_t limit_;
    std::mutex mutex_;
    std::map<int, std::shared_ptr<DevicePool>> pools_;
};

}  // namespace datastates
