#include "datastates/write/device_witness.hpp"

#include <utility>

namespace datastates {

void DeviceWitness::begin(int device, CopyEngine& engine, cuda::StreamHandle stream,
                          std::vector<fingerprint::DeviceWords> memory,
                          std::vector<std::size_t> sources) {
    groups_.push_back({.device = device,
                       .digests = engine.digest(memory, stream),
                       .memory = std::move(memory),
                       .sources = std::move(sources)});
}

void DeviceWitness::read_again(const CaptureEvents& copies, const JobDevices& devices,
                               const std::function<void(std::size_t)>& lose) {
    for (Group& group : groups_) {
        CopyEngine& engine = devices.engine(group.device);
        cuda::Mapping known;
        for (std::size_t i = 0; i < group.sources.size(); ++i) {
            const auto& words = group.memory[i];
            if (engine.has_memory(words.address, words.nbytes, known)) continue;
            group.digests.leave_out(i);
            lose(group.sources[i]);
        }
        copies.order_before(group.device, engine.evacuation_stream(), devices);
        engine.digest_again(group.digests, engine.evacuation_stream());
    }
}

std::vector<std::pair<int, std::shared_ptr<Event>>> DeviceWitness::done() const {
    std::vector<std::pair<int, std::shared_ptr<Event>>> events;
    events.reserve(groups_.size());
    for (const Group& group : groups_) events.emplace_back(group.device, group.digests.done());
    return events;
}

std::vector<std::size_t> DeviceWitness::changed() const {
    std::vector<std::size_t> changed;
    for (const Group& group : groups_) {
        for (std::size_t i = 0; i < group.sources.size(); ++i) {
            if (group.digests.changed(i)) changed.push_back(group.sources[i]);
        }
    }
    return changed;
}

}  // namespace datastates
