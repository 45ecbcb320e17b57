#include "datastates/write/captured_extent.hpp"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "datastates/memory/guarded_copy.hpp"

namespace datastates {
namespace {

// Up to this size a copy costs mostly the syscall, so several pieces share one.
constexpr std::uint64_t kSmall = std::uint64_t{16} << 10;

}  // namespace

bool CapturedExtent::has_host_sources() const {
    return std::ranges::any_of(job->plan().pieces(extent()), [&](const WritePlan::Piece& piece) {
        return piece.source >= 0 && !job->buffers().on_device(piece.source);
    });
}

/// Computes a piece's checksums and digests. It calls `bring` for each stretch before reading it. A
/// plan's chunks are short enough for the processor's cache.
template <typename Bring>
void CapturedExtent::digest(const WritePlan::Piece& piece, Bring&& bring) {
    const auto source = static_cast<std::size_t>(piece.source);
    DigestSweep sweep = job->checksums().sweep(piece);
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
    GuardedCopies copies;
    std::vector<WritePlan::Piece> small;
    std::uint64_t small_bytes = 0;
    const auto from = [&](const WritePlan::Piece& piece) {
        return job->buffers().host(static_cast<std::size_t>(piece.source)) + piece.source_offset;
    };
    const auto copy_small = [&] {
        std::vector<HostCopy> all;
        all.reserve(small.size());
        for (const WritePlan::Piece& piece : small) {
            all.push_back(
                {.to = memory + piece.extent_offset, .from = from(piece), .bytes = piece.length});
        }
        copies.copy(all, [&](std::size_t i) { job->witness().lose(small[i].source); });
        for (const WritePlan::Piece& piece : small) {
            digest(piece, [](std::span<const std::byte>) {});
            job->witness().add(piece, memory + piece.extent_offset);
        }
        small.clear();
        small_bytes = 0;
    };
    for (const WritePlan::Piece& piece : plan.pieces(extent())) {
        if (job->stopped()) return;
        std::byte* const to = memory + piece.extent_offset;
        if (piece.source < 0) {
            if (pick != Pick::lazy) std::ranges::copy(plan.literal(piece), to);
            continue;
        }
        const auto source = static_cast<std::size_t>(piece.source);
        const bool other = pick != Pick::all && plan.eager(source) != (pick == Pick::eager);
        if (other || job->buffers().on_device(piece.source)) continue;
        if (piece.length <= kSmall) {
            small.push_back(piece);
            small_bytes += piece.length;
            if (small.size() == GuardedCopies::kMost ||
                small_bytes > GuardedCopies::kMostBytes - kSmall) {
                copy_small();
            }
            continue;
        }
        digest(piece, [&](std::span<const std::byte> stretch) {
            const std::ptrdiff_t at = stretch.data() - to;
            const HostCopy copy{.to = to + at, .from = from(piece) + at, .bytes = stretch.size()};
            if (!copies.copy(copy)) job->witness().lose(piece.source);
        });
        job->witness().add(piece, to);
    }
    if (!small.empty()) copy_small();
}

std::uint64_t CapturedExtent::digest_devices() {
    std::uint64_t bytes = 0;
    for (const WritePlan::Piece& piece : job->plan().pieces(extent())) {
        if (job->stopped()) break;
        if (!job->buffers().on_device(piece.source)) continue;
        digest(piece, [](std::span<const std::byte>) {});
        bytes += piece.length;
    }
    return bytes;
}

void CapturedExtent::tell_checksums() const {
    for (const auto& [source, fragment] : fragments_) job->checksums().append(source, fragment);
}

void retire(std::unique_ptr<CapturedExtent> extent) {
    const std::shared_ptr<WriteState> job = extent->job;
    extent.reset();  // first, because a waiter for the job may want the block
    job->extent_retired();
}

}  // namespace datastates
