#include "datastates/write/source_checksums.hpp"

namespace datastates {

SourceChecksums::SourceChecksums(const WritePlan& plan)
    : plan_(plan), chunks_(plan.first_chunk(plan.sources()), 0), digests_(plan.digests()) {
    sources_.reserve(plan.sources());
    for (std::size_t i = 0; i < plan.sources(); ++i) {
        const std::size_t first = plan.first_chunk(i);
        sources_.emplace_back(plan.chunk_bytes(),
                              std::span(chunks_).subspan(first, plan.first_chunk(i + 1) - first));
    }
}

std::vector<std::uint32_t> SourceChecksums::of_sources() const {
    std::vector<std::uint32_t> crcs(sources_.size());
    for (std::size_t i = 0; i < crcs.size(); ++i) crcs[i] = of(i);
    return crcs;
}

}  // namespace datastates
