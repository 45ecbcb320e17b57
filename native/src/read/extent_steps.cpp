#include "datastates/read/extent_steps.hpp"

#include <algorithm>

namespace datastates {
namespace {

using Stretch = ReadPlan::Stretch;

/// The stretches that checks cover, those that overlap as one.
std::vector<Stretch> covered(std::span<const ReadPlan::Check> checks) {
    std::vector<Stretch> found;
    for (const ReadPlan::Check& check : checks) {
        const std::uint64_t end = check.offset + check.length;
        if (!found.empty() && check.offset < found.back().offset + found.back().length) {
            Stretch& last = found.back();
            last.length = std::max(last.offset + last.length, end) - last.offset;
        } else {
            found.push_back({.offset = check.offset, .length = check.length});
        }
    }
    return found;
}

}  // namespace

std::vector<Stretch> cut_into_steps(std::uint64_t length, std::span<const ReadPlan::Check> checks,
                                    std::uint64_t longest) {
    const std::vector<Stretch> whole = covered(checks);
    std::vector<Stretch> steps;
    std::uint64_t begin = 0;
    while (length - begin > longest) {
        std::uint64_t cut = begin + longest;
        const auto after = std::ranges::lower_bound(whole, cut, {}, &Stretch::offset);
        if (after != whole.begin()) {
            const Stretch& before = *std::prev(after);
            const std::uint64_t end = before.offset + before.length;
            if (end > cut) cut = before.offset > begin ? before.offset : end;
        }
        if (cut >= length) break;
        steps.push_back({.offset = begin, .length = cut - begin});
        begin = cut;
    }
    steps.push_back({.offset = begin, .length = length - begin});
    return steps;
}

std::uint64_t window_bytes(const std::vector<Stretch>& steps) {
    const std::uint64_t longest = std::ranges::max(steps, {}, &Stretch::length).length;
    return std::min(2 * longest, steps.back().offset + steps.back().length);
}

}  // namespace datastates
