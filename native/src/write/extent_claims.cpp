#include "datastates/write/extent_claims.hpp"

#include <algorithm>
#include <utility>

namespace datastates {

std::vector<bool> evacuable_extents(const WritePlan& plan, const Buffers& buffers, bool enabled) {
    std::vector<bool> evacuable(plan.extents().size(), false);
    for (std::size_t i = 0; enabled && i < evacuable.size(); ++i) {
        const WritePlan::Extent& extent = plan.extents()[i];
        if (!extent.has_lazy || extent.has_eager) continue;
        std::optional<int> device;
        bool alike = true;
        for (const WritePlan::Piece& piece : plan.pieces(extent)) {
            if (piece.source < 0) continue;
            const int found = buffers.device[static_cast<std::size_t>(piece.source)];
            alike = alike && found >= 0 && found == device.value_or(found);
            device = found;
        }
        evacuable[i] = alike;
    }
    return evacuable;
}

ExtentClaims::ExtentClaims(const std::vector<bool>& evacuable) : end_(evacuable.size()) {
    entries_.reserve(evacuable.size());
    for (const bool free : evacuable) {
        entries_.push_back({.state = free ? State::free : State::kept, .image = nullptr});
    }
}

std::optional<std::size_t> ExtentClaims::claim_last() {
    const std::scoped_lock lock(mutex_);
    while (!closed_ && end_ > 0) {
        Entry& entry = entries_[end_ - 1];
        // The capture thread has come this far and has taken all extents before.
        if (entry.state == State::captured && !entry.was_evacuated) return std::nullopt;
        --end_;
        if (entry.state != State::free) continue;
        entry.state = State::evacuating;
        ++evacuating_;
        return end_;
    }
    return std::nullopt;
}

void ExtentClaims::evacuated(std::size_t extent, std::shared_ptr<DeviceImage> image) {
    const std::scoped_lock lock(mutex_);
    Entry& entry = entries_[extent];
    entry = {.state = State::evacuated, .was_evacuated = true, .image = std::move(image)};
    --evacuating_;
    changed_.notify_all();
}

void ExtentClaims::give_up(std::size_t extent) {
    const std::scoped_lock lock(mutex_);
    entries_[extent].state = State::free;
    end_ = std::max(end_, extent + 1);
    --evacuating_;
    changed_.notify_all();
}

std::shared_ptr<DeviceImage> ExtentClaims::capture(std::size_t extent) {
    std::unique_lock lock(mutex_);
    Entry& entry = entries_[extent];
    changed_.wait(lock, [&] { return entry.state != State::evacuating; });
    entry.state = State::captured;
    return std::exchange(entry.image, nullptr);
}

void ExtentClaims::close() {
    std::vector<std::shared_ptr<DeviceImage>> images;  // destroyed without the lock: it takes time
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.wait(lock, [&] { return evacuating_ == 0; });
    for (Entry& entry : entries_) {
        if (entry.image) images.push_back(std::exchange(entry.image, nullptr));
    }
    lock.unlock();
}

std::vector<std::size_t> ExtentClaims::free() const {
    const std::scoped_lock lock(mutex_);
    std::vector<std::size_t> found;
    for (std::size_t i = 0; i < end_; ++i) {
        if (entries_[i].state == State::free) found.push_back(i);
    }
    return found;
}

bool ExtentClaims::was_evacuated(std::size_t extent) const {
    const std::scoped_lock lock(mutex_);
    return entries_[extent].was_evacuated;
}

}  // namespace datastates
