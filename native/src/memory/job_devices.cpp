#include "datastates/memory/job_devices.hpp"

namespace datastates {

void JobDevices::order_after_producers(int device,
                                       cuda::StreamHandle (CopyEngine::*stream)() const) const {
    const CopyEngine& copies = engine(device);
    for (const auto& [where, event] : producers_) {
        if (where == device) copies.wait((copies.*stream)(), *event);
    }
}

void JobDevices::order_after_producers(cuda::StreamHandle (CopyEngine::*stream)() const) const {
    for (const auto& [device, copies] : engines_) order_after_producers(device, stream);
}

}  // namespace datastates
