#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "datastates/checksum/checksum.hpp"

namespace datastates {

/// A stretch of runs of equal length. They lie end to end in a source, and at equal distances in
/// the logical tensor. All numbers are in bytes.
struct DigestRuns {
    std::uint64_t offset;      // in the source
    std::uint64_t length;      // of all runs together
    std::uint64_t run_length;  // of each run
    std::uint64_t after;       // bytes behind the first run in the logical tensor
    std::uint64_t step;        // from one run to the next in the logical tensor
    std::uint32_t digest;      // index of the digest that they contribute to

    std::uint64_t end() const { return offset + length; }
};

/// The columns of runs, as the planner makes them, and the number of digests.
struct DigestRunsArrays {
    std::uint64_t digests = 0;
    std::span<const std::uint64_t> offset{};
    std::span<const std::uint64_t> length{};
    std::span<const std::uint64_t> run_length{};
    std::span<const std::uint64_t> after{};
    std::span<const std::uint64_t> step{};
    std::span<const std::uint32_t> digest{};
};

/// Makes runs of their columns. Throws Error "invalid" for columns that disagree.
std::vector<DigestRuns> make_runs(const DigestRunsArrays& arrays);
/// Throws Error "invalid" unless the runs are sorted by offset, each lies within its source and
/// within its logical tensor, and contributes to one of the digests.
void require_runs(std::span<const DigestRuns> runs, std::uint64_t source_nbytes,
                  std::size_t digests);

/// Folds consecutive bytes of a source into digests. A run contributes its raw CRC-32, shifted by
/// the bytes that follow it in the logical tensor. Contributions are joined by exclusive or, so
/// several threads may fold different bytes of one source at a time, each with its own sweep.
/// Belongs to one thread.
class DigestSweep {
  public:
    /// `runs` must pass `require_runs` and outlive this. The first byte is at `position` of the
    /// source.
    DigestSweep(std::span<const DigestRuns> runs, std::uint64_t position,
                std::span<std::atomic<std::uint32_t>> digests);

    /// Folds the next bytes. It reads each byte once for each stretch of runs that holds it.
    void update(std::span<const std::byte> data);
    /// Adds the contributions of runs that have not ended yet.
    void finish();

  private:
    /// A stretch of runs that has begun. `value` covers its bytes so far; `after` bytes of the
    /// logical tensor follow them.
    struct Open {
        const DigestRuns* runs;
        std::uint32_t value;
        std::uint64_t after;
    };
    void fold(Open& open, std::span<const std::byte> data, std::uint64_t at);
    void tell(const Open& open);

    std::span<const DigestRuns> later_;  // not begun yet
    std::uint64_t position_;
    std::span<std::atomic<std::uint32_t>> digests_;
    std::vector<Open> open_;
    // Kept from run to run: the distance is mostly the same.
    std::uint64_t distance_ = 0;
    Crc32Shift shift_{0};
};

}  // namespace datastates
