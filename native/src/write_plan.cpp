#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "datastates/base/error.hpp"
#include "datastates/plan.hpp"
#include "datastates/plan_checks.hpp"

namespace datastates {
namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kWord = 8;

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
        require(extent.offset >= file_length_ && extent.offset % kPage == 0,
                "extents are not in order, or do not begin at multiples of 4096", i);
        require(
            extent.offset < kLimit && extent.length > 0 && extent.length < kLimit - extent.offset,
            "extent_offset or extent_length is out of range", i);
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
        if (stretches_.empty() || extent.offset > file_length_) {
            stretches_.push_back({.offset = extent.offset, .length = 0});
        }
        stretches_.back().length += extent.length;
        bytes_ += extent.length;
        file_length_ = extent.offset + extent.length;
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
    require_size(arrays.patch_after.size(), q, "patch_after");
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
                                        .source = arrays.patch_source[i],
                                        .after = arrays.patch_after[i]};
    }
}

void WritePlan::Patch::apply(std::uint32_t crc, std::span<std::byte> extent) const {
    static_assert(std::endian::native == std::endian::little);
    std::uint32_t there = 0;
    std::memcpy(&there, extent.data() + offset, sizeof there);
    there ^= after == 0 ? crc : Crc32Shift(after).shift(crc);
    std::memcpy(extent.data() + offset, &there, sizeof there);
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

}  // namespace datastates
