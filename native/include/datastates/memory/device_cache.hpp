#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "datastates/memory/copy_engine.hpp"

namespace datastates {

/// How much more of a device's memory may be taken: `limit` in all, of which `used` is taken, and
/// out of what is `free` all but 1 GiB or a twentieth of the device, whichever is more: the
/// training may be about to ask for it.
std::uint64_t device_room(std::uint64_t limit, std::uint64_t used, std::uint64_t free,
                          std::uint64_t total);

class DeviceShare;

/// Spare device memory for several images: allocating takes far longer than filling it. Given back
/// when the last of them goes. One thread at a time takes from it.
class DeviceSlab {
  public:
    explicit DeviceSlab(std::shared_ptr<DeviceShare> share) : share_(std::move(share)) {}
    ~DeviceSlab();
    DeviceSlab(const DeviceSlab&) = delete;
    DeviceSlab& operator=(const DeviceSlab&) = delete;
    DeviceSlab(DeviceSlab&&) = delete;
    DeviceSlab& operator=(DeviceSlab&&) = delete;

    /// Takes over memory that its share has allocated; none before.
    void hold(cuda::DevicePointer pointer, std::uint64_t bytes) noexcept {
        pointer_ = pointer;
        bytes_ = bytes;
    }
    std::uint64_t bytes() const { return bytes_; }
    /// What it takes of a slab: whole pages.
    static std::uint64_t rounded(std::uint64_t bytes);
    /// Aligned to pages; empty when there is no room for it.
    std::optional<cuda::DevicePointer> take(std::uint64_t bytes);

  private:
    std::shared_ptr<DeviceShare> share_;
    cuda::DevicePointer pointer_ = 0;
    std::uint64_t bytes_ = 0;
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

/// What of one device's memory slabs may take, and have taken. Thread-safe.
class DeviceShare : public std::enable_shared_from_this<DeviceShare> {
  public:
    DeviceShare(std::shared_ptr<CopyEngine> engine, std::uint64_t limit)
        : engine_(std::move(engine)), limit_(limit) {}

    /// How much there is to be had now. Asks the driver: once for many slabs.
    std::uint64_t room() const;
    /// Null when the device has none.
    std::shared_ptr<DeviceSlab> allocate(std::uint64_t bytes);

  private:
    friend class DeviceSlab;
    /// Does not wait for the device, only for copies to the host. REQUIRES: nothing is being copied
    /// into it.
    void release(cuda::DevicePointer pointer, std::uint64_t bytes);

    const std::shared_ptr<CopyEngine> engine_;
    const std::uint64_t limit_;
    mutable std::mutex mutex_;
    std::uint64_t used_ = 0;
};

/// The shares of the devices met so far. Thread-safe.
class DeviceCache {
  public:
    /// At most `limit` bytes of each device; 0: none.
    explicit DeviceCache(std::uint64_t limit) : limit_(limit) {}

    bool enabled() const { return limit_ > 0; }
    /// Null where device memory can only be freed by waiting for the device: before CUDA 11.2, and
    /// on devices without memory pools.
    std::shared_ptr<DeviceShare> share(CopyEngine& engine);

  private:
    const std::uint64_t limit_;
    std::mutex mutex_;
    std::map<int, std::shared_ptr<DeviceShare>> shares_;
};

}  // namespace datastates
