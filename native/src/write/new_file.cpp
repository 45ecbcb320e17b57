#include "datastates/write/new_file.hpp"

#include <algorithm>

#include "datastates/io/file_tail.hpp"

namespace datastates {
namespace {

// Allocating this much takes some 20 ms.
constexpr std::uint64_t kAllocationStep = std::uint64_t{256} << 20;

}  // namespace

void NewFile::allocate(bool by_mapping, const std::atomic<bool>& stopped) {
    if (!file_->traits().in_memory) {
        for (const auto& [offset, length] : plan_.stretches()) {
            allocated_ = file_->allocate(offset, length) || allocated_;
        }
    } else if (by_mapping && !plan_.has_gaps() && allocate_memory(stopped)) {
        file_->map(plan_.file_length());
    }
}

/// Allocates the file's memory, in steps, so that a stopped job need not wait for all of it. False
/// if it is not all allocated; stores to the rest would raise SIGBUS on a full file system.
bool NewFile::allocate_memory(const std::atomic<bool>& stopped) const {
    const std::uint64_t length = plan_.file_length();
    for (std::uint64_t at = 0; at < length && !stopped; at += kAllocationStep) {
        if (!file_->allocate(at, std::min(kAllocationStep, length - at))) return false;
    }
    return !stopped;
}

void NewFile::finish(std::span<const std::byte> tail, Timeline& timeline) {
    const auto tail_start = Clock::now();
    const std::uint64_t length = plan_.file_length();
    write_tail(*file_, length - residual_.size(), residual_, tail);
    timeline.add(Stage::tail, 0, tail_start, residual_.size() + tail.size());
    const auto start = Clock::now();
    file_->sync();
    file_->close_written(length + tail.size(), allocated_);
    timeline.add(Stage::sync, 0, start, plan_.bytes() + tail.size());
}

}  // namespace datastates
