#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <vector>

#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/job_devices.hpp"
#include "datastates/write/capture_events.hpp"

namespace datastates {

/// Notices lazy device memory that changes between submit and the end of its capture. A kernel
/// reads all of it at submit, on the streams that produced it, and again behind the last copy. So
/// it notices one changed byte, too. A gate waits for the second kernel. Owned by the Witness.
class DeviceWitness {
  public:
    /// Reads sources of one device that one stream has produced. Runs in submit's thread.
    void begin(int device, CopyEngine& engine, cuda::StreamHandle stream,
               std::vector<fingerprint::DeviceWords> memory, std::vector<std::size_t> sources);
    /// Whether begin() was called.
    bool any() const { return !groups_.empty(); }
    /// Reads all again, behind `copies`: those of all lazy sources. Calls `lose` with each source
    /// whose memory is unmapped. One thread calls it, once.
    void read_again(const CaptureEvents& copies, const JobDevices& devices,
                    const std::function<void(std::size_t)>& lose);
    /// For each device the event behind the last kernel.
    std::vector<std::pair<int, std::shared_ptr<Event>>> done() const;
    /// The sources that changed. REQUIRES: the kernels of read_again() have ended.
    std::vector<std::size_t> changed() const;

  private:
    struct Group {
        int device;
        DeviceDigests digests;
        std::vector<fingerprint::DeviceWords> memory;
        std::vector<std::size_t> sources;
    };

    std::vector<Group> groups_;
};

}  // namespace datastates
