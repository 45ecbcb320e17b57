#include "datastates/write/witness.hpp"

#include <algorithm>

namespace datastates {
namespace {

std::uint64_t witnessed_in_host_memory(const WritePlan& plan, const Buffers& buffers) {
    std::uint64_t nbytes = 0;
    for (std::size_t i = 0; i < buffers.witness.size(); ++i) {
        if (buffers.witness[i] != 0 && buffers.device[i] < 0) nbytes += plan.source_nbytes(i);
    }
    return nbytes;
}

}  // namespace

Witness::Witness(const WritePlan& plan, const Buffers& buffers)
    : plan_(plan),
      buffers_(buffers),
      few_(witnessed_in_host_memory(plan, buffers) <= kFewAltogether),
      before_(plan.sources(), 0),
      after_(plan.sources()),
      lost_(plan.sources()) {}

void Witness::add(const WritePlan::Piece& piece, const std::byte* data) {
    const auto source = static_cast<std::size_t>(piece.source);
    if (buffers_.witness[source] == 0) return;
    const std::uint64_t first = plan_.first_word(source);
    const std::uint64_t before =
        std::min(first - std::min(first, piece.source_offset), piece.length);
    after_[source] += fingerprint::of_piece(words(source), plan_.source_nbytes(source) - first,
                                            piece.source_offset + before - first, data + before,
                                            piece.length - before);
}

std::vector<int> Witness::torn() const {
    std::vector<bool> torn(lost_.begin(), lost_.end());
    for (std::size_t i = 0; i < before_.size(); ++i) torn[i] = torn[i] || before_[i] != after_[i];
    for (const std::size_t source : devices_.changed()) torn[source] = true;
    std::vector<int> numbers;
    for (std::size_t i = 0; i < torn.size(); ++i) {
        if (torn[i]) numbers.push_back(static_cast<int>(i));
    }
    return numbers;
}

}  // namespace datastates
