#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "datastates/base/unmovable.hpp"
#include "datastates/memory/copy_engine.hpp"

namespace datastates {

/// How many more bytes of a device's memory may be taken. The cache may take `limit` in all and has
/// taken `used`. Of the `free` bytes it leaves 1 GiB or a twentieth of the device (`total`),
/// whichever is more, to the training.
std::uint64_t device_room(std::uint64_t limit, std::uint64_t used, std::uint64_t free,
                          std::uint64_t total);

class DeviceShare;

/// One allocation of spare device memory for several images, as allocating takes far longer than
/// filling it. Its images share ownership; the last one frees it. Only one thread at a time may
/// call take().
class DeviceSlab : Unmovable {
  public:
    explicit DeviceSlab(std::shared_ptr<DeviceShare> share) : share_(std::move(share)) {}
    ~DeviceSlab();

    /// Takes over memory that its share has allocated. Called once, by the share.
    void hold(cuda::DevicePointer pointer, std::uint64_t bytes) noexcept {
        pointer_ = pointer;
        bytes_ = bytes;
    }
    std::uint64_t bytes() const { return bytes_; }
    /// The bytes that take(bytes) uses up: whole pages.
    static std::uint64_t rounded(std::uint64_t bytes);
    /// A part of the slab, aligned to pages; empty when there is no room for it.
    std::optional<cuda::DevicePointer> take(std::uint64_t bytes);

  private:
    std::shared_ptr<DeviceShare> share_;
    cuda::DevicePointer pointer_ = 0;
    std::uint64_t bytes_ = 0;
    std::uint64_t taken_ = 0;
};

/// A part of a slab that holds an extent's device bytes, at their offsets in the extent. The
/// destructor waits until the copies into it have finished. The events of copies out of it keep it
/// alive.
class DeviceImage : Unmovable {
  public:
    DeviceImage(std::shared_ptr<DeviceSlab> slab, cuda::DevicePointer pointer)
        : slab_(std::move(slab)), pointer_(pointer) {}
    ~DeviceImage();

    cuda::DevicePointer pointer() const { return pointer_; }
    /// `event` is behind the copies into the image. Set before any other thread sees the image.
    void set_ready(std::shared_ptr<Event> event) { ready_ = std::move(event); }
    const std::shared_ptr<Event>& ready() const { return ready_; }

  private:
    std::shared_ptr<DeviceSlab> slab_;
    cuda::DevicePointer pointer_;
    std::shared_ptr<Event> ready_;
};

/// The memory of one device that slabs may take and have taken. Its slabs share ownership.
/// Thread-safe.
class DeviceShare : public std::enable_shared_from_this<DeviceShare> {
  public:
    DeviceShare(std::shared_ptr<CopyEngine> engine, std::uint64_t limit)
        : engine_(std::move(engine)), limit_(limit) {}

    /// device_room() at this moment. Asks the driver, so call it once for many slabs. Throws Error
    /// "cuda".
    std::uint64_t room() const;
    /// Null when the driver has no such memory.
    std::shared_ptr<DeviceSlab> allocate(std::uint64_t bytes);

  private:
    friend class DeviceSlab;
    /// Frees memory behind the copies on the capture stream, and waits for these only. REQUIRES:
    /// nothing is being copied into it.
    void release(cuda::DevicePointer pointer, std::uint64_t bytes);

    const std::shared_ptr<CopyEngine> engine_;
    const std::uint64_t limit_;
    mutable std::mutex mutex_;
    std::uint64_t used_ = 0;
};

/// The shares of the devices used so far, owned by the evacuator. Thread-safe.
class DeviceCache {
  public:
    /// Takes at most `limit` bytes of each device. 0 disables the cache.
    explicit DeviceCache(std::uint64_t limit) : limit_(limit) {}

    bool enabled() const { return limit_ > 0; }
    /// The device's share. Null where freeing device memory has to wait for the device: with CUDA
    /// before 11.2, and on devices without memory pools.
    std::shared_ptr<DeviceShare> share(CopyEngine& engine);

  private:
    const std::uint64_t limit_;
    std::mutex mutex_;
    std::map<int, std::shared_ptr<DeviceShare>> shares_;
};

}  // namespace datastates
