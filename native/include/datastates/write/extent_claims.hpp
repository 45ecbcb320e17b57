#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "datastates/plan.hpp"

namespace datastates {

class DeviceImage;

/// Which extents a gate can take, if `enabled`: those whose sources are all lazy and on one device.
/// Eager sources are captured at submit, and a processor copies host memory in any case.
std::vector<bool> evacuable_extents(const WritePlan& plan, const Buffers& buffers, bool enabled);

/// Decides who copies which extent of a job from its sources. The capture thread takes extents from
/// the first one on. A gate that evacuates takes them from the last one back, so that the capture
/// thread goes on in file order. Only one of them copies an extent from its sources. Owned by the
/// WriteState. Thread-safe.
class ExtentClaims {
  public:
    /// `evacuable` says for each extent whether a gate may take it.
    explicit ExtentClaims(const std::vector<bool>& evacuable);

    /// Claims the last free extent for a gate; empty when there is none. The capture thread waits
    /// at this extent until `evacuated` or `give_up`.
    std::optional<std::size_t> claim_last();
    /// The claimed extent's copy to `image` is enqueued.
    void evacuated(std::size_t extent, std::shared_ptr<DeviceImage> image);
    /// Frees the claimed extent again.
    void give_up(std::size_t extent);

    /// Claims an extent for the capture thread. Returns the image that a gate has copied it to, or
    /// null when the capture thread must read the sources.
    std::shared_ptr<DeviceImage> capture(std::size_t extent);

    /// Ends claims by gates, waits for the gates under way, and releases the images.
    void close();
    bool was_evacuated(std::size_t extent) const;
    /// The extents that a gate could claim now, in ascending order.
    std::vector<std::size_t> free() const;

  private:
    enum class State : std::uint8_t { kept, free, evacuating, evacuated, captured };
    struct Entry {
        State state;
        bool was_evacuated = false;
        std::shared_ptr<DeviceImage> image;
    };

    mutable std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Entry> entries_;
    std::size_t end_;  // nothing is free from here on
    std::size_t evacuating_ = 0;
    bool closed_ = false;
};

}  // namespace datastates
