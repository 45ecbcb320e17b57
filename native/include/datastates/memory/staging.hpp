#pragma once

#include <cstddef>
#include <set>
#include <span>
#include <vector>

#include "datastates/base/unmovable.hpp"
#include "datastates/memory/copy_events.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/memory/job_devices.hpp"

namespace datastates {

/// A block of the host cache that bytes pass through on their way to devices, in parts that take
/// turns. Belongs to one thread.
class Staging : Unmovable {
  public:
    /// Copies begin after the devices' producers.
    Staging(Block block, JobDevices devices, std::size_t part_bytes);
    /// Waits for all copies. Where the driver refuses that for too long, the block is not used
    /// again.
    ~Staging();

    /// The memory of the next part. Waits until its last copies have ended. Throws Error "cuda", as
    /// all functions here.
    std::span<std::byte> part();
    /// Starts a copy from the part to a device.
    void copy(int device, const RowCopy& rows);
    /// Ends the part: the next one has its turn.
    void next();
    /// Waits for all copies.
    void drain();

  private:
    Block block_;
    JobDevices devices_;
    const std::size_t part_bytes_;
    std::vector<CopyEvents> events_;  // behind the last copies of each part
    std::set<int> used_;              // devices with copies that are behind no event
    std::size_t at_ = 0;
};

}  // namespace datastates
