#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
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

/// Goes through an extent's pieces. They may overlap.
class PieceSteps {
  public:
    explicit PieceSteps(std::span<const ReadPlan::Piece> pieces) : left_(pieces) {}

    /// Calls `take(piece, from, to)` for all parts of pieces between the last end and a new one;
    /// these are offsets in the extent. Each stretch of a piece is taken as a piece.
    template <typename Take>
    void advance(std::uint64_t end, Take&& take) {
        for (const ReadPlan::Piece& piece : left_) {
            if (piece.extent_offset >= end) break;
            if (piece.count == 1) {
                take_part(piece, end, take);
                continue;
            }
            ReadPlan::Piece one = piece;
            one.count = 1;
            for (std::uint64_t i = first_behind(at_, piece.extent_offset, piece.extent_step);
                 i < piece.count; ++i) {
                one.extent_offset = piece.extent_offset + (i * piece.extent_step);
                if (one.extent_offset >= end) break;
                one.dest_offset = piece.dest_offset + (i * piece.dest_step);
                take_part(one, end, take);
            }
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
    template <typename Take>
    void take_part(const ReadPlan::Piece& piece, std::uint64_t end, Take& take) const {
        const std::uint64_t from = std::max(at_, piece.extent_offset);
        const std::uint64_t to = std::min(end, piece.extent_end());
        if (from < to) take(piece, from, to);
    }

    std::span<const ReadPlan::Piece> left_;
    std::uint64_t at_ = 0;
};

}  // namespace datastates
