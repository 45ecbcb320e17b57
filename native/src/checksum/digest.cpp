#include "datastates/checksum/digest.hpp"

#include <algorithm>
#include <string>

#include "datastates/base/error.hpp"

namespace datastates {
namespace {

// Sums of a few values below this cannot overflow.
constexpr std::uint64_t kLimit = std::uint64_t{1} << 62;

void require(bool condition, const char* what, std::size_t index) {
    if (!condition) throw Error::invalid(std::string(what) + " (at " + std::to_string(index) + ")");
}

}  // namespace

std::vector<DigestRuns> make_runs(const DigestRunsArrays& arrays) {
    const std::size_t n = arrays.offset.size();
    require(arrays.length.size() == n && arrays.run_length.size() == n &&
                arrays.after.size() == n && arrays.step.size() == n && arrays.digest.size() == n,
            "the runs' columns differ in length", n);
    // Every digest has runs. This bounds the memory for the digests.
    require(arrays.digests <= n, "there are more digests than runs", n);
    std::vector<DigestRuns> runs(n);
    for (std::size_t i = 0; i < n; ++i) {
        runs[i] = {.offset = arrays.offset[i],
                   .length = arrays.length[i],
                   .run_length = arrays.run_length[i],
                   .after = arrays.after[i],
                   .step = arrays.step[i],
                   .digest = arrays.digest[i]};
    }
    return runs;
}

void require_runs(std::span<const DigestRuns> runs, std::uint64_t source_nbytes,
                  std::size_t digests) {
    for (std::size_t i = 0; i < runs.size(); ++i) {
        const DigestRuns& run = runs[i];
        require(i == 0 || runs[i - 1].offset <= run.offset, "runs are not in order", i);
        require(run.offset <= source_nbytes && run.length <= source_nbytes - run.offset,
                "runs are outside their source", i);
        require(run.length > 0 && run.run_length > 0 && run.length % run.run_length == 0,
                "runs are not all of one length", i);
        const std::uint64_t steps = (run.length / run.run_length) - 1;
        require(run.after < kLimit && run.step >= run.run_length &&
                    (steps == 0 || run.step <= run.after / steps),
                "runs reach beyond their logical tensor, or overlap in it", i);
        require(run.digest < digests, "runs contribute to no digest", i);
    }
}

DigestSweep::DigestSweep(std::span<const DigestRuns> runs, std::uint64_t position,
                         std::span<std::atomic<std::uint32_t>> digests)
    : later_(runs), position_(position), digests_(digests) {}

void DigestSweep::update(std::span<const std::byte> data) {
    if (later_.empty() && open_.empty()) return;
    const std::uint64_t end = position_ + data.size();
    for (; !later_.empty() && later_.front().offset < end; later_ = later_.subspan(1)) {
        const DigestRuns& runs = later_.front();
        if (runs.end() > position_) open_.push_back({.runs = &runs, .value = 0, .after = 0});
    }
    for (Open& open : open_) {
        const std::uint64_t first = std::max(position_, open.runs->offset);
        const std::uint64_t last = std::min(end, open.runs->end());
        fold(open, data.subspan(first - position_, last - first), first - open.runs->offset);
    }
    position_ = end;
    std::erase_if(open_, [&](const Open& open) {
        if (open.runs->end() > end) return false;
        tell(open);
        return true;
    });
}

void DigestSweep::finish() {
    for (const Open& open : open_) tell(open);
    open_.clear();
}

void DigestSweep::fold(Open& open, std::span<const std::byte> data, std::uint64_t at) {
    const DigestRuns& runs = *open.runs;
    std::uint64_t run = at / runs.run_length;
    std::uint64_t rest = runs.run_length - (at % runs.run_length);
    for (; !data.empty(); ++run, rest = runs.run_length) {
        const std::uint64_t take = std::min<std::uint64_t>(rest, data.size());
        const std::uint64_t after = runs.after - (run * runs.step) + (rest - take);
        if (open.value != 0) {
            if (open.after - after != distance_) {
                distance_ = open.after - after;
                shift_ = Crc32Shift(distance_);
            }
            open.value = shift_.shift(open.value);
        }
        open.value ^= crc32_raw(data.first(take));
        open.after = after;
        data = data.subspan(take);
    }
}

void DigestSweep::tell(const Open& open) {
    // Relaxed, because readers of the digests synchronize with this thread by other means.
    digests_[open.runs->digest].fetch_xor(Crc32Shift(open.after).shift(open.value),
                                          std::memory_order_relaxed);
}

}  // namespace datastates
