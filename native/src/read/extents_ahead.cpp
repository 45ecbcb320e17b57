#include "datastates/read/extents_ahead.hpp"

#include <utility>

namespace datastates {

void ExtentsAhead::put(const ReadPlan::Extent& extent, Kept kept) {
    const std::scoped_lock lock(mutex_);
    if (cleared_) return;
    entries_.try_emplace(extent.offset, Entry{.length = extent.length, .kept = std::move(kept)});
}

std::optional<ExtentsAhead::Kept> ExtentsAhead::take(const ReadPlan::Extent& extent) {
    const std::scoped_lock lock(mutex_);
    const auto found = entries_.find(extent.offset);
    if (found == entries_.end() || found->second.length != extent.length) return std::nullopt;
    Kept kept = std::move(found->second.kept);
    entries_.erase(found);
    return kept;
}

void ExtentsAhead::clear() {
    const std::scoped_lock lock(mutex_);
    cleared_ = true;
    entries_.clear();
}

void ExtentsAhead::count(std::uint64_t bytes_read) {
    const std::scoped_lock lock(mutex_);
    bytes_read_ += bytes_read;
}

std::uint64_t ExtentsAhead::bytes_read() const {
    const std::scoped_lock lock(mutex_);
    return bytes_read_;
}

std::uint64_t ExtentsAhead::take_bytes_read() {
    const std::scoped_lock lock(mutex_);
    return std::exchange(bytes_read_, 0);
}

}  // namespace datastates
