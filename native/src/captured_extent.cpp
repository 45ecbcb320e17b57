#include "datastates/captured_extent.hpp"

#include <algorithm>
#include <cstring>

namespace datastates {

bool CapturedExtent::has_host_sources() const {
    return std::ranges::any_of(job->plan().pieces(extent()), [&](const WritePlan::Piece& piece) {
        return piece.source >= 0 && !job->on_device(piece);
    });
}

/// `bring` is shown each stretch before it is read. A plan's chunks are short enough for the
/// processor's cache.
template <typename Bring>
void CapturedExtent::digest(const WritePlan::Piece& piece, Bring&& bring) {
    const auto source = static_cast<std::size_t>(piece.source);
    DigestSweep sweep = job->sweep(piece);
    fragments(
        block.memory().subspan(piece.extent_offset, piece.length), piece.source_offset,
        job->plan().chunk_bytes(),
        [&](std::span<const std::byte> stretch) {
            bring(stretch);
            sweep.update(stretch);
        },
        [&](const CrcFragment& fragment) {
            fragments_.push_back({.source = source, .fragment = fragment});
        });
    sweep.finish();
}

void CapturedExtent::copy_host(Pick pick) {
    const WritePlan& plan = job->plan();
    std::byte* const memory = block.memory().data();
    for (const WritePlan::Piece& piece : plan.pieces(extent())) {
        if (job->stopped()) return;
        std::byte* const to = memory + piece.extent_offset;
        if (piece.source < 0) {
            if (pick != Pick::lazy) std::ranges::copy(plan.literal(piece), to);
            continue;
        }
        const auto source = static_cast<std::size_t>(piece.source);
        const bool other = pick != Pick::all && plan.eager(source) != (pick == Pick::eager);
        if (other || !job->on_host(source)) continue;
        const std::byte* const from = job->host_memory(source) + piece.source_offset;
        digest(piece, [&](std::span<const std::byte> stretch) {
            const std::ptrdiff_t at = stretch.data() - to;
            std::memcpy(to + at, from + at, stretch.size());
        });
        job->fingerprint(piece, to);
    }
}

std::uint64_t CapturedExtent::digest_devices() {
    std::uint64_t bytes = 0;
    for (const WritePlan::Piece& piece : job->plan().pieces(extent())) {
        if (job->stopped()) break;
        if (!job->on_device(piece)) continue;
        digest(piece, [](std::span<const std::byte>) {});
        bytes += piece.length;
    }
    return bytes;
}

void CapturedExtent::tell_checksums() const {
    for (const auto& [source, fragment] : fragments_) job->checksum(source, fragment);
}

}  // namespace datastates
