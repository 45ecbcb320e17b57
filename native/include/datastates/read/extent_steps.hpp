#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <vector>

#include "datastates/plan.hpp"

/// An extent is worked on step by step, so that its bytes stay in the processor's caches.
namespace datastates {

/// Cuts an extent into steps of at most `longest` bytes, so that no check lies in two of them. A
/// step is longer where checks that are longer, or overlap, leave no other cut. Together the steps
/// are the whole extent.
std::vector<ReadPlan::Stretch> cut_into_steps(std::uint64_t length,
                                              std::span<const ReadPlan::Check> checks,
                                              std::uint64_t longest);

/// Bytes of memory for steps that need not stay there: two steps, or the whole extent if it is
/// shorter.
std::uint64_t window_bytes(const std::vector<ReadPlan::Stretch>& steps);

/// Bytes of an extent in memory.
struct StepMemory {
    std::byte* first;
    std::uint64_t offset;  // of the first byte, in the extent

    std::byte* at(std::uint64_t in_extent) const { return first + (in_extent - offset); }
};

/// The number of the first of equally spaced stretches that reaches behind `at`, or that lies
/// behind it.
inline std::uint64_t first_behind(std::uint64_t at, std::uint64_t offset, std::uint64_t step) {
    return at <= offset || step == 0 ? 0 : (at - offset) / step;
}

/// Calls `take(part)` for all parts of a piece in a range of the extent. A part is a piece by
/// itself: a part of one stretch, or whole stretches.
template <typename Take>
void take_parts(const ReadPlan::Piece& piece, std::uint64_t low, std::uint64_t high, Take&& take) {
    // Of each of `count` stretches, from number `first` on, `length` bytes from `at` on.
    const auto part = [&](std::uint64_t first, std::uint64_t at, std::uint64_t length,
                          std::uint64_t count) {
        ReadPlan::Piece made = piece;
        made.extent_offset += (first * piece.extent_step) + at;
        made.dest_offset += (first * piece.dest_step) + at;
        made.length = length;
        made.count = count;
        return made;
    };
    const std::uint64_t length = piece.length;
    for (std::uint64_t i = first_behind(low, piece.extent_offset, piece.extent_step);
         i < piece.count;) {
        const std::uint64_t begin = piece.extent_offset + (i * piece.extent_step);
        if (begin >= high) return;
        if (begin >= low && length <= high - begin) {
            const std::uint64_t fit =
                piece.count == 1 ? 1 : 1 + ((high - begin - length) / piece.extent_step);
            const std::uint64_t whole = std::min(fit, piece.count - i);
            take(part(i, 0, length, whole));
            i += whole;
            continue;
        }
        const std::uint64_t from = std::max(low, begin);
        const std::uint64_t to = std::min(high, begin + length);
        if (from < to) take(part(i, from - begin, to - from, 1));
        ++i;
    }
}

/// Copies the stretches of a part, which begins at `from`, to host memory.
inline void copy_part(const ReadPlan::Piece& part, const std::byte* from, std::byte* to) {
    for (std::uint64_t i = 0; i < part.count; ++i) {
        std::memcpy(to + (i * part.dest_step), from + (i * part.extent_step), part.length);
    }
}

/// Goes through an extent's pieces. They may overlap.
class PieceSteps {
  public:
    explicit PieceSteps(std::span<const ReadPlan::Piece> pieces) : left_(pieces) {}

    /// Calls `take(part)` for all parts of pieces between the last end and a new one; see
    /// take_parts().
    template <typename Take>
    void advance(std::uint64_t end, Take&& take) {
        for (const ReadPlan::Piece& piece : left_) {
            if (piece.extent_offset >= end) break;
            take_parts(piece, at_, end, take);
        }
        while (!left_.empty() && left_.front().extent_end() <= end) left_ = left_.subspan(1);
        at_ = end;
    }

    /// The piece, of one stretch, that has all bytes between the last end and a new one; null if
    /// there is none, or another piece has some of them, too.
    const ReadPlan::Piece* only(std::uint64_t end) const {
        const ReadPlan::Piece* found = nullptr;
        for (const ReadPlan::Piece& piece : left_) {
            if (piece.extent_offset >= end) break;
            if (piece.extent_end() <= at_) continue;
            if (found != nullptr || piece.count != 1) return nullptr;
            if (piece.extent_offset > at_ || piece.extent_end() < end) return nullptr;
            found = &piece;
        }
        return found;
    }
    /// The last end.
    std::uint64_t at() const { return at_; }

  private:
    std::span<const ReadPlan::Piece> left_;
    std::uint64_t at_ = 0;
};

}  // namespace datastates
