#pragma once

#include <map>
#include <memory>
#include <vector>

#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/job_devices.hpp"

namespace datastates {

/// Events behind the copies of a job's device sources: what a training's stream waits for before
/// it changes the sources. Owned by the WriteState, whose mutex guards it.
class CaptureEvents {
  public:
    /// Adds an event behind copies from `device`. Lazy copies share a stream, so only the last
    /// event of these is kept.
    void add(int device, std::shared_ptr<Event> event, bool lazy);
    /// Adds an event behind copies to spare memory of `device`. These share a stream, too.
    void add_evacuated(int device, std::shared_ptr<Event> event);
    /// Makes a stream of `device` wait for all copies from that device. Throws Error "cuda".
    void order_before(int device, cuda::StreamHandle stream, const JobDevices& devices) const;

  private:
    struct OfDevice {
        std::vector<std::shared_ptr<Event>> eager;
        std::shared_ptr<Event> lazy;
        std::shared_ptr<Event> evacuated;
    };
    std::map<int, OfDevice> events_;
};

}  // namespace datastates
