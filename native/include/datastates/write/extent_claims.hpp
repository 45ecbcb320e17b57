#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace datastates {

class DeviceImage;

/// Who copies which extent off its sources: the capture thread, from the first one on, or a gate
/// that evacuates, from the last one back, so that what is left for the capture thread stays in
/// file order. Nobody copies what another one does. Thread-safe.
class ExtentClaims {
  public:
    /// `evacuable`: for each extent, whether a gate may take it.
    explicit ExtentClaims(const std::vector<bool>& evacuable);

    /// A gate's claim: the last extent that is free for one. Until `evacuated` or `give_up` the
    /// capture thread waits for it.
    std::optional<std::size_t> claim_last();
    void evacuated(std::size_t extent, std::shared_ptr<DeviceImage> image);
    /// The extent is free again.
    void give_up(std::size_t extent);

    /// The capture thread's claim. Returns what a gate has copied the extent to, or null when its
    /// sources are to be read.
    std::shared_ptr<DeviceImage> capture(std::size_t extent);

    /// Leaves nothing to be claimed, waits for gates under way, and lets go of the images.
    void close();
    bool was_evacuated(std::size_t extent) const;
    /// What is free for a gate to claim now, in ascending order.
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
