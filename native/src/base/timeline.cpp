#include "datastates/base/timeline.hpp"

#include <algorithm>
#include <array>
#include <new>
#include <tuple>

namespace datastates {
namespace {

constexpr std::array<std::string_view, kStages> kNames = {
    "submit", "create", "capture", "cache_wait", "checksum", "write",
    "tail",   "sync",   "read",    "verify",     "copy"};

}  // namespace

std::string_view to_string(Stage stage) { return kNames.at(static_cast<std::size_t>(stage)); }

void Timeline::add(const Span& span) noexcept {
    const std::scoped_lock lock(mutex_);
    try {
        if (spans_.size() < limit_) {
            spans_.push_back(span);
        } else {
            ++dropped_;
        }
    } catch (const std::bad_alloc&) {
        ++dropped_;  // no job fails for that
    }
}

std::vector<Span> Timeline::spans() const {
    const std::scoped_lock lock(mutex_);
    return spans_;
}

std::uint64_t Timeline::dropped() const {
    const std::scoped_lock lock(mutex_);
    return dropped_;
}

std::uint32_t Tracks::take() {
    const auto free = std::ranges::find(taken_, false);
    const auto track = static_cast<std::uint32_t>(free - taken_.begin());
    if (free == taken_.end()) taken_.push_back(false);
    taken_[track] = true;
    return track;
}

}  // namespace datastates
