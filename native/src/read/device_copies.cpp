#include "datastates/read/device_copies.hpp"

#include <set>

namespace datastates {

bool DeviceCopies::ended(bool wait) const {
    for (const auto& event : events) {
        if (wait && !event->synchronize()) throw cuda::capture_lasts();
        if (!event->passed()) return false;
    }
    return true;
}

DeviceCopies copy_to_devices(const ReadState& job, const ReadPlan::Extent& extent,
                             const std::byte* data) {
    DeviceCopies copies{.begin = Clock::now(), .bytes = 0, .events = {}};
    std::set<int> devices;
    try {
        for (const ReadPlan::Piece& piece : job.plan().pieces(extent)) {
            const auto dest = static_cast<std::size_t>(piece.dest);
            const int device = job.buffers().device[dest];
            if (piece.length == 0 || device < 0) continue;
            const CopyEngine& engine = job.engine(device);
            devices.insert(device);
            engine.to_device(job.buffers().address[dest] + piece.dest_offset,
                             data + piece.extent_offset, piece.length, engine.restore_stream());
            copies.bytes += piece.length;
        }
        for (const int device : devices) {
            const CopyEngine& engine = job.engine(device);
            copies.events.push_back(engine.record(engine.restore_stream()));
        }
    } catch (...) {
        for (const int device : devices) {
            job.engine(device).drain(job.engine(device).restore_stream());
        }
        throw;
    }
    return copies;
}

}  // namespace datastates
