#include "datastates/memory/staging.hpp"

#include <utility>

namespace datastates {

Staging::Staging(Block block, JobDevices devices, std::size_t part_bytes)
    : block_(std::move(block)),
      devices_(std::move(devices)),
      part_bytes_(part_bytes),
      events_(block_.memory().size() / part_bytes) {
    devices_.order_after_producers(&CopyEngine::restore_stream);
}

Staging::~Staging() {
    bool ended = true;
    for (const int device : used_) {
        const CopyEngine& engine = devices_.engine(device);
        ended = engine.drain(engine.restore_stream()) && ended;
    }
    for (const CopyEvents& events : events_) {
        for (const auto& event : events) ended = event->synchronize() && ended;
    }
    if (!ended) block_.lose();
}

std::span<std::byte> Staging::part() {
    static_cast<void>(ended(events_[at_], true));
    events_[at_].clear();
    return block_.memory().subspan(at_ * part_bytes_, part_bytes_);
}

void Staging::copy(int device, const RowCopy& rows) {
    const CopyEngine& engine = devices_.engine(device);
    used_.insert(device);
    engine.to_device(rows, engine.restore_stream());
}

void Staging::next() {
    for (const int device : used_) {
        const CopyEngine& engine = devices_.engine(device);
        events_[at_].push_back(engine.record(engine.restore_stream()));
    }
    used_.clear();
    at_ = (at_ + 1) % events_.size();
}

void Staging::drain() {
    for (CopyEvents& events : events_) {
        static_cast<void>(ended(events, true));
        events.clear();
    }
}

}  // namespace datastates
