#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "datastates/checksum/checksum.hpp"
#include "datastates/checksum/digest.hpp"
#include "datastates/plan.hpp"

namespace datastates {

/// The checksums and digests of the captured bytes of a job's sources. Owned by the WriteState. Any
/// thread may fold bytes into digests; only the writer appends checksums, in file order.
class SourceChecksums {
  public:
    /// `plan` outlives this.
    explicit SourceChecksums(const WritePlan& plan);

    /// Appends a fragment's checksum, in the order of the source's bytes.
    void append(std::size_t source, const CrcFragment& fragment) {
        sources_[source].append(fragment, plan_.full_chunk());
    }
    /// A sweep that folds a piece's bytes into their digests.
    DigestSweep sweep(const WritePlan::Piece& piece) {
        return {plan_.digest_runs(static_cast<std::size_t>(piece.source)), piece.source_offset,
                digests_};
    }
    std::uint32_t of(std::size_t source) const { return sources_[source].value(); }
    std::vector<std::uint32_t> of_sources() const;
    std::span<const std::uint32_t> of_chunks() const { return chunks_; }
    std::vector<std::uint32_t> digests() const { return {digests_.begin(), digests_.end()}; }

  private:
    const WritePlan& plan_;
    std::vector<std::uint32_t> chunks_;
    std::vector<ChunkedCrc32> sources_;  // they write into chunks_
    std::vector<std::atomic<std::uint32_t>> digests_;
};

}  // namespace datastates
