#include "datastates/write/witness.hpp"

#include <algorithm>
#include <utility>

#include "datastates/checksum/fingerprint.hpp"

namespace datastates {
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
    if (buffers_.on_device(piece.source)) {
        after_[source] +=
            fingerprint::whole((piece.source_offset + before - first) / fingerprint::kWord,
                               data + before, piece.length - before);
        return;
    }
    after_[source] += fingerprint::of_piece(plan_.source_nbytes(source) - first,
                                            piece.source_offset + before - first, data + before,
                                            piece.length - before);
}

void Witness::add_devices(const WritePlan::Extent& extent, const std::byte* memory) {
    for (const WritePlan::Piece& piece : plan_.pieces(extent)) {
        if (buffers_.on_device(piece.source)) add(piece, memory + piece.extent_offset);
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
