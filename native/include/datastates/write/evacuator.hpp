#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "datastates/memory/device_cache.hpp"
#include "datastates/memory/gather.hpp"
#include "datastates/write/write_state.hpp"

namespace datastates {

/// Shortens the wait of a training step at a gate. Extents that the capture thread has not begun
/// are copied to spare device memory, which takes milliseconds, and captured from there later. If
/// possible, one slab is allocated for all of them: beside copies on the bus, each allocation of
/// any size takes a millisecond or two. Owned by the executor; called by the threads that gate. A
/// mutex lets one evacuate at a time. Thread-safe.
class Evacuator {
  public:
    /// Uses at most `device_cache_bytes` of each device. 0 disables it.
    explicit Evacuator(std::uint64_t device_cache_bytes) : cache_(device_cache_bytes) {}

    bool enabled() const { return cache_.enabled(); }
    /// Enqueues the copies, as far as there is room. An error fails the job and is not thrown.
    void evacuate(WriteState& job);

  private:
    /// A claim on an extent. Settle it when the copy is enqueued; otherwise it frees the extent.
    class Claim {
      public:
        /// Claims the last free extent; empty when there is none.
        static std::optional<Claim> last(ExtentClaims& claims);
        Claim(Claim&& other) noexcept;
        Claim& operator=(Claim&&) = delete;
        Claim(const Claim&) = delete;
        Claim& operator=(const Claim&) = delete;
        ~Claim();

        std::size_t extent() const { return extent_; }
        void settle(std::shared_ptr<DeviceImage> image);

      private:
        Claim(ExtentClaims& claims, std::size_t extent) : claims_(&claims), extent_(extent) {}

        ExtentClaims* claims_;  // null: settled or moved
        std::size_t extent_;
    };
    struct Move {
        Claim claim;
        std::shared_ptr<DeviceImage> image;
    };
    /// The state of one device during one evacuation.
    struct Place {
        std::shared_ptr<DeviceShare> share;
        std::uint64_t room = 0;
        std::shared_ptr<DeviceSlab> slab;  // images are taken from it
        // Moves to the slab that are not enqueued yet.
        std::vector<Move> moves{};
        std::vector<gather::Range> ranges{};
        cuda::Mapping known{};
    };

    bool evacuate_what_fits(WriteState& job);
    Place open(WriteState& job, int device);
    static std::shared_ptr<DeviceImage> image(WriteState& job, int device, std::uint64_t bytes,
                                              Place& place);
    static void take_slab(WriteState& job, int device, std::uint64_t bytes, Place& place);
    static void add(WriteState& job, Claim claim, std::shared_ptr<DeviceImage> image, Place& place);
    static void enqueue(WriteState& job, int device, Place& place);

    DeviceCache cache_;
    std::mutex mutex_;  // one evacuation at a time: they share the room
};

}  // namespace datastates
