#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "datastates/base/timeline.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/plan.hpp"
#include "datastates/read/read_state.hpp"

namespace datastates {

/// The copies of one extent's bytes to devices. While they run, the bytes must stay in their block.
struct DeviceCopies {
    Clock::time_point begin{};
    std::uint64_t bytes = 0;
    std::vector<std::shared_ptr<Event>> events;  // one for each device; none: nothing was copied

    /// Whether all copies have ended. With `wait`, waits for that. Throws Error "cuda".
    bool ended(bool wait) const;
};

/// Starts the copies of an extent's pieces for devices, on the devices' restore streams. `data` is
/// the extent's first byte. If this throws, no copy is running. Thread-safe.
DeviceCopies copy_to_devices(const ReadState& job, const ReadPlan::Extent& extent,
                             const std::byte* data);

}  // namespace datastates
