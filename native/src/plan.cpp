#include "datastates/plan.hpp"

#include <algorithm>
#include <limits>
#include <string>

#include "datastates/base/error.hpp"

namespace datastates {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kWord = 8;
// Sums of a few values below this cannot overflow, and off_t holds them.
constexpr std::uint64_t kLimit = std::uint64_t{1} << 62;

void require(bool condition, const char* what, std::size_t index) {
    if (condition) return;
    throw Error::invalid(std::string(what) + " (at " + std::to_string(index) + ")");
}

void require_size(std::size_t actual, std::size_t expected, const char* name) {
    if (actual == expected) return;
    throw Error::invalid(std::string(name) + " has " + std::to_string(actual) +
                         " entries, expected " + std::to_string(expected));
}

/// Checks a CSR index: it begins at 0, never falls, and ends at `total`.
void require_index(std::span<const std::uint64_t> index, std::size_t rows, std::size_t total,
                   const char* name) {
    require_size(index.size(), rows + 1, name);
    require(index.front() == 0, name, 0);
    for (std::size_t i = 0; i < rows; ++i) require(index[i] <= index[i + 1], name, i);
    require(index.back() == total, name, rows);
}

bool within(std::uint64_t offset, std::uint64_t length, std::uint64_t total) {
    return offset <= total && length <= total - offset;
}

/// Whether `count` stretches, of which each begins `step` behind the last one, do not overlap and
/// lie within `total` bytes.
bool spaced_within(std::uint64_t offset, std::uint64_t length, std::uint64_t count,
                   std::uint64_t step, std::uint64_t total) {
    if (count == 0 || !within(offset, length, total)) return false;
    return count == 1 ||
           (step > 0 && step >= length && count - 1 <= (total - offset - length) / step);
}

}  // namespace

WritePlan::WritePlan(const WritePlanArrays& arrays)
    : chunk_bytes_(arrays.chunk_bytes),
      full_chunk_(arrays.chunk_bytes),
      literal_(arrays.literal.begin(), arrays.literal.end()) {
    take_sources(arrays);
    take_extents(arrays);
    take_patches(arrays);
    take_digests(arrays);
}

void WritePlan::take_sources(const WritePlanArrays& arrays) {
    if (chunk_bytes_ == 0 || chunk_bytes_ >= kLimit) {
        throw Error::invalid("chunk_bytes must be positive");
    }
    const std::size_t n = arrays.source_nbytes.size();
    require(n <= static_cast<std::size_t>(std::numeric_limits<std::int32_t>::max()),
            "too many sources", n);
    require_size(arrays.eager.size(), n, "eager");
    source_nbytes_.assign(arrays.source_nbytes.begin(), arrays.source_nbytes.end());
    eager_.assign(arrays.eager.begin(), arrays.eager.end());
    first_word_.assign(n, 0);
    first_chunk_.reserve(n + 1);
    first_chunk_.push_back(0);
    for (std::size_t i = 0; i < n; ++i) {
        require(source_nbytes_[i] < kLimit, "source_nbytes is too large", i);
        const std::uint64_t chunks =
            (source_nbytes_[i] / chunk_bytes_) + (source_nbytes_[i] % chunk_bytes_ != 0 ? 1 : 0);
        require(chunks < kLimit - first_chunk_.back(), "too many chunks", i);
        first_chunk_.push_back(first_chunk_.back() + chunks);
    }
}

WritePlan::Piece WritePlan::checked_piece(const WritePlanArrays& arrays, std::size_t index) const {
    const Piece piece{.source = arrays.piece_source[index],
                      .source_offset = arrays.piece_source_offset[index],
                      .extent_offset = arrays.piece_extent_offset[index],
                      .length = arrays.piece_length[index]};
    require(piece.length > 0, "piece_length is 0", index);
    if (piece.source < 0) {
        require(piece.source == -1, "piece_source is out of range", index);
        require(within(piece.source_offset, piece.length, literal_.size()),
                "a piece is outside the literal", index);
        return piece;
    }
    const auto source = static_cast<std::size_t>(piece.source);
    require(source < source_nbytes_.size(), "piece_source is out of range", index);
    const std::uint64_t nbytes = source_nbytes_[source];
    require(within(piece.source_offset, piece.length, nbytes), "a piece is outside its source",
            index);
    return piece;
}

void WritePlan::take_extents(const WritePlanArrays& arrays) {
    const std::size_t m = arrays.extent_offset.size();
    const std::size_t p = arrays.piece_source.size();
    require_size(arrays.extent_length.size(), m, "extent_length");
    require_size(arrays.piece_source_offset.size(), p, "piece_source_offset");
    require_size(arrays.piece_extent_offset.size(), p, "piece_extent_offset");
    require_size(arrays.piece_length.size(), p, "piece_length");
    require_index(arrays.extent_piece, m, p, "extent_piece");
    extents_.reserve(m);
    pieces_.reserve(p);
    std::vector<std::uint64_t> placed(source_nbytes_.size(), 0);
    bool lazy_seen = false;
    for (std::size_t i = 0; i < m; ++i) {
        Extent extent{.offset = arrays.extent_offset[i],
                      .length = arrays.extent_length[i],
                      .first_piece = arrays.extent_piece[i],
                      .end_piece = arrays.extent_piece[i + 1],
                      .first_patch = 0,
                      .end_patch = 0,
                      .has_sources = false,
                      .has_eager = false,
                      .has_lazy = false};
        require(extent.offset == file_length_, "extents are not contiguous from 0", i);
        require(extent.length > 0 && extent.length < kLimit - file_length_,
                "extent_length is out of range", i);
        require(i + 1 == m || extent.length % kPage == 0, "extent_length is not a multiple of 4096",
                i);
        std::uint64_t filled = 0;
        for (std::size_t k = extent.first_piece; k < extent.end_piece; ++k) {
            const Piece piece = checked_piece(arrays, k);
            require(piece.extent_offset == filled && piece.length <= extent.length - filled,
                    "pieces do not tile their extent", k);
            filled += piece.length;
            pieces_.push_back(piece);
            if (piece.source < 0) continue;
            const auto source = static_cast<std::size_t>(piece.source);
            require(piece.source_offset == placed[source], "a source's pieces are not in order", k);
            placed[source] += piece.length;
            if (piece.source_offset == 0) {
                const std::uint64_t before =
                    (kWord - (extent.offset + piece.extent_offset)) % kWord;
                first_word_[source] =
                    static_cast<std::uint8_t>(std::min(before, source_nbytes_[source]));
            }
            require(placed[source] == source_nbytes_[source] ||
                        (extent.offset + piece.extent_offset + piece.length) % kWord == 0,
                    "a source is cut at an offset that is not a multiple of 8", k);
            extent.has_sources = true;
            if (eager(source)) {
                require(!lazy_seen, "an eager source comes after a lazy one", k);
                extent.has_eager = true;
            } else {
                extent.has_lazy = lazy_seen = true;
            }
        }
        require(filled == extent.length, "pieces do not fill their extent", i);
        file_length_ += extent.length;
        max_extent_length_ = std::max(max_extent_length_, extent.length);
        if (extent.has_sources) ++source_extents_;
        if (extent.has_eager) eager_extents_ = i + 1;
        extents_.push_back(extent);
    }
    for (std::size_t i = 0; i < placed.size(); ++i) {
        require(placed[i] == source_nbytes_[i], "a source is not wholly in the file", i);
    }
}

void WritePlan::take_patches(const WritePlanArrays& arrays) {
    const std::size_t q = arrays.patch_extent.size();
    require_size(arrays.patch_offset.size(), q, "patch_offset");
    require_size(arrays.patch_source.size(), q, "patch_source");
    std::vector<std::size_t> last_extent(source_nbytes_.size(), 0);
    for (std::size_t i = 0; i < extents_.size(); ++i) {
        for (const Piece& piece : pieces(extents_[i])) {
            if (piece.source >= 0) last_extent[static_cast<std::size_t>(piece.source)] = i;
        }
    }
    std::vector<std::size_t> counts(extents_.size() + 1, 0);
    for (std::size_t i = 0; i < q; ++i) {
        const std::uint64_t extent = arrays.patch_extent[i];
        require(extent < extents_.size(), "patch_extent is out of range", i);
        require(within(arrays.patch_offset[i], sizeof(std::uint32_t), extents_[extent].length),
                "a patch is outside its extent", i);
        const std::int32_t source = arrays.patch_source[i];
        require(source >= 0 && static_cast<std::size_t>(source) < source_nbytes_.size(),
                "patch_source is out of range", i);
        require(last_extent[static_cast<std::size_t>(source)] <= extent,
                "a patch comes before the end of its source", i);
        ++counts[extent + 1];
    }
    for (std::size_t i = 0; i < extents_.size(); ++i) {
        extents_[i].first_patch = counts[i];
        counts[i + 1] += counts[i];
        extents_[i].end_patch = extents_[i].first_patch;
    }
    patches_.resize(q);
    for (std::size_t i = 0; i < q; ++i) {
        Extent& extent = extents_[arrays.patch_extent[i]];
        patches_[extent.end_patch++] = {.offset = arrays.patch_offset[i],
                                        .source = arrays.patch_source[i]};
    }
}

void WritePlan::take_digests(const WritePlanArrays& arrays) {
    const std::size_t n = arrays.runs_source.size();
    require_size(arrays.runs.offset.size(), n, "runs_offset");
    runs_ = make_runs(arrays.runs);
    digests_ = static_cast<std::size_t>(arrays.runs.digests);
    first_runs_.assign(source_nbytes_.size() + 1, 0);
    for (std::size_t i = 0; i < n; ++i) {
        const std::int32_t source = arrays.runs_source[i];
        require(source >= 0 && static_cast<std::size_t>(source) < source_nbytes_.size(),
                "runs_source is out of range", i);
        require(i == 0 || arrays.runs_source[i - 1] <= source, "runs_source is not ascending", i);
        ++first_runs_[static_cast<std::size_t>(source) + 1];
    }
    for (std::size_t i = 0; i < source_nbytes_.size(); ++i) {
        first_runs_[i + 1] += first_runs_[i];
        require_runs(digest_runs(i), source_nbytes_[i], digests_);
    }
}

std::span<const DigestRuns> WritePlan::digest_runs(std::size_t source) const {
    return std::span(runs_).subspan(first_runs_[source],
                                    first_runs_[source + 1] - first_runs_[source]);
}

std::span<const WritePlan::Piece> WritePlan::pieces(const Extent& extent) const {
    return std::span(pieces_).subspan(extent.first_piece, extent.end_piece - extent.first_piece);
}

std::span<const WritePlan::Patch> WritePlan::patches(const Extent& extent) const {
    return std::span(patches_).subspan(extent.first_patch, extent.end_patch - extent.first_patch);
}

std::span<const std::byte> WritePlan::literal(const Piece& piece) const {
    return std::span(literal_).subspan(piece.source_offset, piece.length);
}

ReadPlan::ReadPlan(const ReadPlanArrays& arrays)
    : dest_nbytes_(arrays.dest_nbytes.begin(), arrays.dest_nbytes.end()) {
    const std::size_t m = arrays.extent_offset.size();
    const std::size_t p = arrays.piece_dest.size();
    const std::size_t c = arrays.check_offset.size();
    const std::size_t s = arrays.span_offset.size();
    require_size(arrays.extent_length.size(), m, "extent_length");
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
                      .bytes = 0};
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

void Buffers::validate(std::span<const std::uint64_t> nbytes, bool with_witness) const {
    const std::size_t n = nbytes.size();
    require_size(address.size(), n, "ptr");
    require_size(device.size(), n, "device");
    require_size(stream.size(), n, "stream");
    if (with_witness) require_size(witness.size(), n, "witness");
    for (std::size_t i = 0; i < n; ++i) {
        require(device[i] >= -1, "device is out of range", i);
        if (nbytes[i] == 0) continue;
        require(address[i] != 0, "a pointer is null", i);
        require(address[i] <= std::numeric_limits<std::uint64_t>::max() - nbytes[i],
                "a pointer is out of range", i);
    }
}

}  // namespace datastates
