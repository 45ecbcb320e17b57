#include "datastates/read/device_copies.hpp"

namespace datastates {

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
    pieces_.advance(end, [&](const ReadPlan::Piece& part) {
        const auto dest = static_cast<std::size_t>(part.dest);
        const int device = job_.buffers().device[dest];
        if (device < 0) return;
        const CopyEngine& engine = job_.devices().engine(device);
        devices_.insert(device);
        engine.to_device({.device = job_.buffers().address[dest] + part.dest_offset,
                          .device_step = part.dest_step,
                          .host = data.at(part.extent_offset),
                          .host_step = part.extent_step,
                          .length = part.length,
                          .count = part.count},
                         engine.restore_stream());
        bytes_ += part.length * part.count;
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
