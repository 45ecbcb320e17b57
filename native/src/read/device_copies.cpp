#include "datastates/read/device_copies.hpp"

namespace datastates {

bool ended(const CopyEvents& events, bool wait) {
    for (const auto& event : events) {
        if (wait && !event->synchronize()) throw cuda::capture_lasts();
        if (!event->passed()) return false;
    }
    return true;
}

DeviceCopies::DeviceCopies(const ReadState& job, const ReadPlan::Extent& extent)
    : job_(job),
      pieces_(job.devices().empty() ? std::span<const ReadPlan::Piece>()
                                    : job.plan().pieces(extent)) {}

DeviceCopies::~DeviceCopies() {
    for (const int device : devices_) {
        const CopyEngine& engine = job_.devices().engine(device);
        engine.drain(engine.restore_stream());
    }
}

void DeviceCopies::advance(std::uint64_t end, const StepMemory& data) {
    if (bytes_ == 0) begin_ = Clock::now();
    pieces_.advance(end, [&](const auto& piece, std::uint64_t from, std::uint64_t to) {
        const auto dest = static_cast<std::size_t>(piece.dest);
        const int device = job_.buffers().device[dest];
        if (device < 0) return;
        const CopyEngine& engine = job_.devices().engine(device);
        devices_.insert(device);
        const std::uint64_t address =
            job_.buffers().address[dest] + piece.dest_offset + (from - piece.extent_offset);
        engine.to_device(address, data.at(from), to - from, engine.restore_stream());
        bytes_ += to - from;
    });
}

CopyEvents DeviceCopies::record() {
    CopyEvents events;
    for (const int device : devices_) {
        const CopyEngine& engine = job_.devices().engine(device);
        events.push_back(engine.record(engine.restore_stream()));
    }
    devices_.clear();
    return events;
}

}  // namespace datastates
