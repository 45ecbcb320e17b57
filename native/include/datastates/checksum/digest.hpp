#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "datastates/checksum/checksum.hpp"

namespace datastates {

/// Runs of one length that lie end to end in a source, and equally far apart in the logical tensor
/// that they are parts of. All in bytes.
struct DigestRuns {
    std::uint64_t offset;      // in the source
    std::uint64_t length;      // of all runs together
    std::uint64_t run_length;  // of each
    std::uint64_t after;       // that follow the first run in the logical tensor
    std::uint64_t step;        // from one run's begin to the next one's in the logical tensor
    std::uint32_t digest;      // what they contribute to

    std::uint64_t end() const { return offset + length; }
};

/// Runs as they come from the planner, and how many digests they contribute to.
struct DigestRunsArrays {
    std::uint64_t digests = 0;
    std::span<const std::uint64_t> offset{};
    std::span<const std::uint64_t> length{};
    std::span<const std::uint64_t> run_length{};
    std::span<const std::uint64_t> after{};
    std::span<const std::uint64_t> step{};
    std::span<const std::uint32_t> digest{};
};

/// Throws Error "invalid" for arrays that disagree.
std::vector<DigestRuns> make_runs(const DigestRunsArrays& arrays);
/// Throws Error "invalid" unless the runs are sorted by offset, each lies within its source and
/// within its logical tensor, and contributes to one of the digests.
void require_runs(std::span<const DigestRuns> runs, std::uint64_t source_nbytes,
                  std::size_t digests);

/// Folds a source's bytes, as they go by in order, into digests: a run contributes its raw CRC-32
/// shifted by the bytes that follow it, and contributions are joined by exclusive or, so that
/// several threads may fold different bytes of one source at a time.
class DigestSweep {
  public:
    /// `runs` must pass `require_runs` and outlive this. Bytes come from `position` on.
    DigestSweep(std::span<const DigestRuns> runs, std::uint64_t position,
                std::span<std::atomic<std::uint32_t>> digests);

    /// Goes on with the next bytes. Every byte is read once for each of the runs that it is in.
    void update(std::span<const std::byte> data);
    /// Tells the digests of the runs that are not over yet.
    void finish();

  private:
    /// A stretch of runs that has begun. `value` covers what has gone by of it, up to `after` bytes
    /// before the logical tensor's end.
    struct Open {
        const DigestRuns* runs;
        std::uint32_t value;
        std::uint64_t after;
    };
    void fold(Open& open, std::span<const std::byte> data, std::uint64_t at);
    void tell(const Open& open);

    std::span<const DigestRuns> later_;  // not begun
    std::uint64_t position_;
    std::span<std::atomic<std::uint32_t>> digests_;
    std::vector<Open> open_;
    // The distance in the logical tensor is mostly the same from one run to the next.
    std::uint64_t distance_ = 0;
    Crc32Shift shift_{0};
};

}  // namespace datastates
