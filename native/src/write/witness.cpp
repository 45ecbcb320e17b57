#include "datastates/write/witness.hpp"

#include <algorithm>
#include <utility>

#include "datastates/checksum/fingerprint.hpp"

namespace datastates {
namespace {

// How many pieces ahead of the current one to prefetch for fingerprints.
constexpr std::size_t kFetchAhead = 2;

}  // namespace

Witness::Witness(const WritePlan& plan, const Buffers& buffers)
    : plan_(plan),
      buffers_(buffers),
      before_(plan.sources(), 0),
      after_(plan.sources()),
      lost_(plan.sources()) {}

void Witness::add(const WritePlan::Piece& piece, const std::byte* data) {
    const auto source = static_cast<std::size_t>(piece.source);
    if (buffers_.witness[source] == 0) return;
    const std::uint64_t first = plan_.first_word(source);
    const std::uint64_t before =
        std::min(first - std::min(first, piece.source_offset), piece.length);
    after_[source] += fingerprint::of_piece(plan_.source_nbytes(source) - first,
                                            piece.source_offset + before - first, data + before,
                                            piece.length - before);
}

void Witness::add_devices(const WritePlan::Extent& extent, const std::byte* memory) {
    const auto pieces = plan_.pieces(extent);
    const auto whole = [&](const WritePlan::Piece& piece) {
        return piece.length == plan_.source_nbytes(static_cast<std::size_t>(piece.source));
    };
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        if (i + kFetchAhead < pieces.size()) {
            const WritePlan::Piece& later = pieces[i + kFetchAhead];
            if (buffers_.on_device(later.source) && whole(later)) {
                fingerprint::prefetch(memory + later.extent_offset, later.length);
            }
        }
        if (buffers_.on_device(pieces[i].source)) add(pieces[i], memory + pieces[i].extent_offset);
    }
}

std::vector<int> Witness::torn() {
    for (const auto& [fingerprints, sources] : std::exchange(device_before_, {})) {
        for (std::size_t i = 0; i < sources.size(); ++i) {
            before_[sources[i]] = fingerprints.at(i);
        }
    }
    std::vector<int> torn;
    for (std::size_t i = 0; i < before_.size(); ++i) {
        if (before_[i] != after_[i] || lost_[i]) torn.push_back(static_cast<int>(i));
    }
    return torn;
}

}  // namespace datastates
