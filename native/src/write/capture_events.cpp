#include "datastates/write/capture_events.hpp"

#include <utility>

namespace datastates {

void CaptureEvents::add(int device, std::shared_ptr<Event> event, bool lazy) {
    OfDevice& events = events_[device];
    if (lazy) {
        events.lazy = std::move(event);
    } else {
        events.eager.push_back(std::move(event));
    }
}

void CaptureEvents::add_evacuated(int device, std::shared_ptr<Event> event) {
    events_[device].evacuated = std::move(event);
}

void CaptureEvents::order_before(int device, cuda::StreamHandle stream,
                                 const JobDevices& devices) const {
    const auto found = events_.find(device);
    if (found == events_.end()) return;
    const auto& [eager, lazy, evacuated] = found->second;
    const CopyEngine& copies = devices.engine(device);
    for (const auto& event : eager) copies.wait(stream, *event);
    if (lazy) copies.wait(stream, *lazy);
    if (evacuated) copies.wait(stream, *evacuated);
}

}  // namespace datastates
