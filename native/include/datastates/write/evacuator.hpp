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

/// Frees a training step from waiting for the bus: what a job has not begun to capture when its
/// gate is reached is copied to spare device memory, which takes milliseconds, and captured from
/// there afterwards. The driver is asked for one slab for all of it where it can be had: beside
/// copies on the bus each allocation takes a millisecond or two, of whatever size. Thread-safe.
class Evacuator {
  public:
    /// At most `device_cache_bytes` of each device; 0: never.
    explicit Evacuator(std::uint64_t device_cache_bytes) : cache_(device_cache_bytes) {}

    bool enabled() const { return cache_.enabled(); }
    /// Enqueues the copies, as far as there is room. An error fails the job.
    void evacuate(WriteState& job);

  private:
    /// An extent that is ours to copy: settled when its copy was enqueued, else free again.
    class Claim {
      public:
        /// Empty when nothing is left.
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

        ExtentClaims* claims_;  // null: settled
        std::size_t extent_;
    };
    struct Move {
        Claim claim;
        std::shared_ptr<DeviceImage> image;
    };
    /// One device, during one evacuation.
    struct Place {
        std::shared_ptr<DeviceShare> share;
        std::uint64_t room = 0;
        std::shared_ptr<DeviceSlab> slab;  // the one that images are taken from
        // What goes to the slab and was not enqueued yet.
        std::vector<Move> moves{};
        std::vector<gather::Range> ranges{};
        std::uint64_t known = cuda::kNowhere;
    };

    bool evacuate_what_fits(WriteState& job);
    Place open(const WriteState& job, int device);
    static std::shared_ptr<DeviceImage> image(WriteState& job, int device, std::uint64_t bytes,
                                              Place& place);
    static void take_slab(WriteState& job, int device, std::uint64_t bytes, Place& place);
    static void add(WriteState& job, Claim claim, std::shared_ptr<DeviceImage> image, Place& place);
    static void enqueue(WriteState& job, int device, Place& place);

    DeviceCache cache_;
    std::mutex mutex_;  // one at a time: they share the room
};

}  // namespace datastates
