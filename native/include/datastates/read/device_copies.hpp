#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <vector>

#include "datastates/base/timeline.hpp"
#include "datastates/base/unmovable.hpp"
#include "datastates/memory/copy_events.hpp"
#include "datastates/plan.hpp"
#include "datastates/read/extent_steps.hpp"
#include "datastates/read/read_state.hpp"

namespace datastates {

/// Starts the copies of an extent's pieces for devices, on the devices' restore streams, step by
/// step. While they run, their bytes must stay where they are. Belongs to one thread.
class DeviceCopies : Unmovable {
  public:
    DeviceCopies(const ReadState& job, const ReadPlan::Extent& extent);
    /// Waits for the copies that are behind no event.
    ~DeviceCopies();

    /// Starts the copies of the bytes between the last end and a new one, an offset in the extent.
    /// Throws Error "cuda".
    void advance(std::uint64_t end, const StepMemory& data);
    /// Records events behind all copies since the last call; none if there were none. Throws Error
    /// "cuda".
    CopyEvents record();
    std::uint64_t bytes() const { return bytes_; }
    /// When the first copy was started.
    Clock::time_point begin() const { return begin_; }

  private:
    const ReadState& job_;
    PieceSteps pieces_;
    std::set<int> devices_;  // with copies that are behind no event
    std::uint64_t bytes_ = 0;
    Clock::time_point begin_{};
};

}  // namespace datastates
