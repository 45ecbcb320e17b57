#include "datastates/read/extent_place.hpp"

namespace datastates {
namespace {

constexpr std::uint64_t kPage = 4096;
// Below this, a direct read in place costs more than a copy from a block.
constexpr std::uint64_t kInPlaceMinimum = std::uint64_t{64} << 10;
// A read is widened to whole pages, for direct I/O, if that adds at most one byte to this many.
constexpr std::uint64_t kWidening = 64;

}  // namespace

std::byte* in_place(const ReadState& job, const File& file, const ReadPlan::Extent& extent,
                    bool cached) {
    const auto pieces = job.plan().pieces(extent);
    if (pieces.size() != 1 || extent.sparse()) return nullptr;
    const ReadPlan::Piece& piece = pieces.front();
    const auto dest = static_cast<std::size_t>(piece.dest);
    if (!job.buffers().on_host(piece.dest) || piece.length != extent.length) return nullptr;
    auto* const to = job.buffers().host(dest) + piece.dest_offset;
    if (cached || !file.direct()) return to;
    const bool fits = extent.length >= kInPlaceMinimum &&
                      file.fits_direct(to, file.traits().offset_alignment, extent.offset);
    return fits ? to : nullptr;
}

std::pair<std::uint64_t, std::uint64_t> widened(const ReadPlan::Extent& extent, const File& file) {
    const std::uint64_t begin = extent.offset / kPage * kPage;
    const std::uint64_t end = (extent.offset + extent.length + kPage - 1) / kPage * kPage;
    const bool wide = file.direct() && file.traits().offset_alignment <= kPage &&
                      (end - begin - extent.length) * kWidening <= extent.length;
    return wide ? std::pair(begin, end) : std::pair(extent.offset, extent.offset + extent.length);
}

}  // namespace datastates
