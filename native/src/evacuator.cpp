#include "datastates/evacuator.hpp"

#include <algorithm>
#include <utility>

#include "datastates/copy_batch.hpp"
#include "datastates/error.hpp"

namespace datastates {

void Evacuator::evacuate(WriteState& job) {
    if (!enabled()) return;
    const std::scoped_lock lock(mutex_);
    const auto start = Clock::now();
    if (evacuate_what_fits(job)) job.add_evacuate_seconds(seconds_since(start));
}

/// Whether there was anything.
bool Evacuator::evacuate_what_fits(WriteState& job) {
    std::map<int, Place> places;
    bool any = false;
    while (!job.stopped()) {
        const auto index = job.claims().claim_last();
        if (!index) break;
        any = true;
        const int device = job.device_of(*index);
        std::shared_ptr<DeviceImage> image;
        try {
            auto place = places.find(device);
            if (place == places.end()) place = places.emplace(device, open(job, device)).first;
            image = copy(job, *index, device, place->second);
        } catch (...) {
            job.claims().give_up(*index);
            job.fail(Error::current());
            break;
        }
        if (!image) {  // no room: this one and those before it wait for the bus
            job.claims().give_up(*index);
            break;
        }
        const auto ready = image->ready();
        job.claims().evacuated(*index, std::move(image));
        job.extent_evacuated(*index, device, ready);
    }
    return any;
}

Evacuator::Place Evacuator::open(const WriteState& job, int device) {
    CopyEngine& engine = job.engine(device);
    Place place{.pool = cache_.pool(engine), .room = 0, .slab = nullptr};
    if (!place.pool) return place;
    place.room = place.pool->room();
    job.order_after_producers(device, engine.evacuation_stream());
    return place;
}

/// Null when there is no room.
std::shared_ptr<DeviceImage> Evacuator::image(const WriteState& job, std::uint64_t bytes,
                                              Place& place) {
    auto pointer = place.slab ? place.slab->take(bytes) : std::nullopt;
    if (!pointer) {
        const std::uint64_t wanted = job.plan().max_extent_length() * kExtentsPerSlab;
        const std::uint64_t slab = std::min(wanted, place.room);
        if (slab < bytes) return nullptr;
        place.slab = place.pool->allocate(slab);
        if (!place.slab) return nullptr;
        place.room -= slab;
        pointer = place.slab->take(bytes);
        if (!pointer) return nullptr;
    }
    return std::make_shared<DeviceImage>(place.slab, *pointer);
}

std::shared_ptr<DeviceImage> Evacuator::copy(const WriteState& job, std::size_t index, int device,
                                             Place& place) {
    const WritePlan::Extent& extent = job.plan().extents()[index];
    auto image = Evacuator::image(job, extent.length, place);
    if (!image) return nullptr;
    CopyEngine& engine = job.engine(device);
    CopyBatch batch(engine, engine.evacuation_stream());
    try {
        for (const WritePlan::Piece& piece : job.plan().pieces(extent)) {
            if (piece.source < 0) continue;
            const auto source = static_cast<std::size_t>(piece.source);
            batch.on_device(image->pointer() + piece.extent_offset,
                            job.buffers().address[source] + piece.source_offset, piece.length);
        }
        batch.flush();
        image->set_ready(engine.record(batch.stream()));
    } catch (...) {
        engine.drain(batch.stream());  // nothing may read the sources after a failure
        throw;
    }
    return image;
}

}  // namespace datastates
