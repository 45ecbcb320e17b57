#include "datastates/write/evacuator.hpp"

#include <algorithm>
#include <utility>

#include "datastates/base/error.hpp"

namespace datastates {

std::optional<Evacuator::Claim> Evacuator::Claim::last(ExtentClaims& claims) {
    const auto extent = claims.claim_last();
    if (!extent) return std::nullopt;
    return Claim(claims, *extent);
}

Evacuator::Claim::Claim(Claim&& other) noexcept
    : claims_(std::exchange(other.claims_, nullptr)), extent_(other.extent_) {}

Evacuator::Claim::~Claim() {
    if (claims_ != nullptr) claims_->give_up(extent_);
}

void Evacuator::Claim::settle(std::shared_ptr<DeviceImage> image) {
    std::exchange(claims_, nullptr)->evacuated(extent_, std::move(image));
}

void Evacuator::evacuate(WriteState& job) {
    if (!enabled()) return;
    const std::scoped_lock lock(mutex_);
    const auto start = Clock::now();
    try {
        if (evacuate_what_fits(job)) job.add_evacuate_seconds(seconds_since(start));
    } catch (...) {
        job.fail(Error::current());
    }
}

/// Returns whether there was an extent to evacuate.
bool Evacuator::evacuate_what_fits(WriteState& job) {
    std::map<int, Place> places;
    bool any = false;
    while (!job.stopped()) {
        std::optional<Claim> claim = Claim::last(job.claims());
        if (!claim) break;
        any = true;
        const int device = job.device_of(claim->extent());
        auto place = places.find(device);
        if (place == places.end()) place = places.emplace(device, open(job, device)).first;
        const std::uint64_t bytes = job.plan().extents()[claim->extent()].length;
        auto image = Evacuator::image(job, device, bytes, place->second);
        if (!image) break;  // no room: the capture thread takes this and all before it
        add(job, std::move(*claim), std::move(image), place->second);
    }
    for (auto& [device, place] : places) enqueue(job, device, place);
    return any;
}

Evacuator::Place Evacuator::open(WriteState& job, int device) {
    CopyEngine& engine = job.devices().engine(device);
    Place place{.share = cache_.share(engine), .room = 0, .slab = nullptr};
    if (!place.share) return place;
    place.room = place.share->room();
    job.devices().order_after_producers(device, &CopyEngine::evacuation_stream);
    return place;
}

/// An image for an extent of `bytes`; null when there is no room.
std::shared_ptr<DeviceImage> Evacuator::image(WriteState& job, int device, std::uint64_t bytes,
                                              Place& place) {
    auto pointer = place.slab ? place.slab->take(bytes) : std::nullopt;
    if (!pointer) {
        enqueue(job, device, place);  // the slab is full
        take_slab(job, device, bytes, place);
        pointer = place.slab ? place.slab->take(bytes) : std::nullopt;
        if (!pointer) return nullptr;
    }
    return std::make_shared<DeviceImage>(place.slab, *pointer);
}

/// Allocates a slab for an extent of `bytes` and all extents that are still free. Where that fails,
/// it tries smaller slabs.
void Evacuator::take_slab(WriteState& job, int device, std::uint64_t bytes, Place& place) {
    std::uint64_t slab = DeviceSlab::rounded(bytes);
    for (const std::size_t extent : job.claims().free()) {
        if (job.device_of(extent) != device) continue;
        slab += DeviceSlab::rounded(job.plan().extents()[extent].length);
    }
    place.slab.reset();
    for (slab = std::min(slab, place.room); slab >= bytes && !place.slab; slab /= 2) {
        place.slab = place.share->allocate(slab);
        if (place.slab) place.room -= slab;
    }
}

void Evacuator::add(WriteState& job, Claim claim, std::shared_ptr<DeviceImage> image,
                    Place& place) {
    for (const WritePlan::Piece& piece : job.plan().pieces(job.plan().extents()[claim.extent()])) {
        if (piece.source < 0) continue;
        if (!job.has_memory(piece, place.known)) continue;
        const auto source = static_cast<std::size_t>(piece.source);
        gather::add(place.ranges, image->pointer() + piece.extent_offset,
                    job.buffers().address[source] + piece.source_offset, piece.length);
    }
    place.moves.push_back({.claim = std::move(claim), .image = std::move(image)});
}

/// Enqueues all moves to the place's slab, as one launch with one event. Only then settles their
/// claims, so that nobody captures from an image before its copy is enqueued, nor looks at the
/// sources again before that event is known.
void Evacuator::enqueue(WriteState& job, int device, Place& place) {
    if (place.moves.empty()) return;
    CopyEngine& engine = job.devices().engine(device);
    const std::shared_ptr<Event> ready =
        place.ranges.empty()
            ? engine.record(engine.evacuation_stream())
            : engine.gather(place.ranges, engine.evacuation_stream(), gather::kBlocksOnDevice);
    for (Move& move : place.moves) {
        move.image->set_ready(ready);
        job.extent_evacuated(move.claim.extent(), device, ready);
        move.claim.settle(std::move(move.image));
    }
    place.moves.clear();
    place.ranges.clear();
}

}  // namespace datastates
