#include <algorithm>

#include "datastates/plan.hpp"
#include "datastates/plan_checks.hpp"

namespace datastates {

ReadPlan::ReadPlan(const ReadPlanArrays& arrays)
    : dest_nbytes_(arrays.dest_nbytes.begin(), arrays.dest_nbytes.end()) {
    const std::size_t m = arrays.extent_offset.size();
    const std::size_t p = arrays.piece_dest.size();
    const std::size_t c = arrays.check_offset.size();
    const std::size_t s = arrays.span_offset.size();
    require_size(arrays.extent_length.size(), m, "extent_length");
    require_size(arrays.extent_shared.size(), m, "extent_shared");
    require_size(arrays.span_length.size(), s, "span_length");
    require_size(arrays.span_count.size(), s, "span_count");
    require_size(arrays.span_step.size(), s, "span_step");
    require_size(arrays.piece_dest_offset.size(), p, "piece_dest_offset");
    require_size(arrays.piece_extent_offset.size(), p, "piece_extent_offset");
    require_size(arrays.piece_length.size(), p, "piece_length");
    require_size(arrays.piece_count.size(), p, "piece_count");
    require_size(arrays.piece_extent_step.size(), p, "piece_extent_step");
    require_size(arrays.piece_dest_step.size(), p, "piece_dest_step");
    require_size(arrays.check_length.size(), c, "check_length");
    require_size(arrays.check_crc.size(), c, "check_crc");
    require_size(arrays.check_record.size(), c, "check_record");
    require_index(arrays.extent_span, m, s, "extent_span");
    require_index(arrays.extent_piece, m, p, "extent_piece");
    require_index(arrays.extent_check, m, c, "extent_check");
    extents_.reserve(m);
    spans_.reserve(s);
    pieces_.reserve(p);
    checks_.reserve(c);
    std::uint64_t previous = 0;
    for (std::size_t i = 0; i < m; ++i) {
        Extent extent{.offset = arrays.extent_offset[i],
                      .length = arrays.extent_length[i],
                      .first_span = arrays.extent_span[i],
                      .end_span = arrays.extent_span[i + 1],
                      .first_piece = arrays.extent_piece[i],
                      .end_piece = arrays.extent_piece[i + 1],
                      .first_check = arrays.extent_check[i],
                      .end_check = arrays.extent_check[i + 1],
                      .bytes = 0,
                      .shared = arrays.extent_shared[i] != 0};
        require(extent.offset >= previous, "extents are not ascending", i);
        require(extent.offset < kLimit && extent.length < kLimit, "an extent is out of range", i);
        require(extent.length > 0, "extent_length is 0", i);
        require(bytes_ < kLimit, "the plan reads too much", i);
        previous = extent.offset;
        take_spans(arrays, extent);
        for (std::size_t k = extent.first_piece; k < extent.end_piece; ++k) {
            const Piece piece = checked_piece(arrays, extent, k);
            require(k == extent.first_piece || piece.extent_offset >= pieces_.back().extent_offset,
                    "the pieces of an extent are not ascending", k);
            pieces_.push_back(piece);
        }
        for (std::size_t k = extent.first_check; k < extent.end_check; ++k) {
            const Piece whole{.dest = 0,
                              .dest_offset = 0,
                              .extent_offset = arrays.check_offset[k],
                              .length = arrays.check_length[k]};
            require(is_read(extent, whole), "a check is outside what is read of its extent", k);
            require(k == extent.first_check || arrays.check_offset[k] >= arrays.check_offset[k - 1],
                    "the checks of an extent are not ascending", k);
            checks_.push_back({.offset = arrays.check_offset[k],
                               .length = arrays.check_length[k],
                               .crc = arrays.check_crc[k],
                               .record = arrays.check_record[k]});
        }
        shares_ = shares_ || extent.shared;
        max_extent_length_ = std::max(max_extent_length_, extent.length);
        extents_.push_back(extent);
    }
}

/// The first span begins with the extent, the last one ends with it, and none overlap.
void ReadPlan::take_spans(const ReadPlanArrays& arrays, Extent& extent) {
    std::uint64_t end = 0;
    for (std::size_t k = extent.first_span; k < extent.end_span; ++k) {
        const Span span{.offset = arrays.span_offset[k],
                        .length = arrays.span_length[k],
                        .count = arrays.span_count[k],
                        .step = arrays.span_step[k]};
        require(k == extent.first_span ? span.offset == 0 : span.offset >= end,
                "a span does not begin with its extent, or overlaps the one before it", k);
        require(span.length > 0 &&
                    spaced_within(span.offset, span.length, span.count, span.step, extent.length),
                "a span is outside its extent", k);
        end = span.end();
        extent.bytes += span.length * span.count;
        spans_.push_back(span);
    }
    require(end == extent.length, "the spans do not end with their extent", extent.end_span);
    bytes_ += extent.bytes;
}

ReadPlan::Piece ReadPlan::checked_piece(const ReadPlanArrays& arrays, const Extent& extent,
                                        std::size_t index) const {
    const Piece piece{.dest = arrays.piece_dest[index],
                      .dest_offset = arrays.piece_dest_offset[index],
                      .extent_offset = arrays.piece_extent_offset[index],
                      .length = arrays.piece_length[index],
                      .count = arrays.piece_count[index],
                      .extent_step = arrays.piece_extent_step[index],
                      .dest_step = arrays.piece_dest_step[index]};
    require(piece.dest >= 0 && static_cast<std::size_t>(piece.dest) < dest_nbytes_.size(),
            "piece_dest is out of range", index);
    require(spaced_within(piece.dest_offset, piece.length, piece.count, piece.dest_step,
                          dest_nbytes_[static_cast<std::size_t>(piece.dest)]),
            "a piece is outside its destination", index);
    require(spaced_within(piece.extent_offset, piece.length, piece.count, piece.extent_step,
                          extent.length) &&
                is_read(extent, piece),
            "a piece is outside what is read of its extent", index);
    return piece;
}

/// Whether all stretches of a piece, which are within the extent, lie in stretches that are read.
bool ReadPlan::is_read(const Extent& extent, const Piece& piece) const {
    const std::span<const Span> all = spans(extent);
    std::uint64_t offset = piece.extent_offset;
    for (std::uint64_t left = piece.count; left > 0;) {
        const auto after = std::ranges::upper_bound(all, offset, {}, &Span::offset);
        if (after == all.begin()) return false;
        const Span& span = *std::prev(after);
        const std::uint64_t begin = offset - span.offset;
        const std::uint64_t number = span.count == 1 ? 0 : begin / span.step;
        const std::uint64_t room = span.length - std::min(span.length, begin - number * span.step);
        if (number >= span.count || piece.length > room) return false;
        // As many as the span has alike: all that fit into its one stretch, or one in each.
        std::uint64_t alike = 1;
        if (span.count == 1 && piece.extent_step > 0) {
            alike += (room - piece.length) / piece.extent_step;
        } else if (span.count > 1 && span.step == piece.extent_step) {
            alike = span.count - number;
        }
        alike = std::min(alike, left);
        left -= alike;
        offset += alike * piece.extent_step;
    }
    return true;
}

std::span<const ReadPlan::Span> ReadPlan::spans(const Extent& extent) const {
    return std::span(spans_).subspan(extent.first_span, extent.end_span - extent.first_span);
}

std::span<const ReadPlan::Piece> ReadPlan::pieces(const Extent& extent) const {
    return std::span(pieces_).subspan(extent.first_piece, extent.end_piece - extent.first_piece);
}

std::span<const ReadPlan::Check> ReadPlan::checks(const Extent& extent) const {
    return std::span(checks_).subspan(extent.first_check, extent.end_check - extent.first_check);
}

}  // namespace datastates
