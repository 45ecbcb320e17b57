#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

#include "datastates/checksum/fingerprint.hpp"
#include "datastates/memory/guarded_copy.hpp"

namespace datastates {

/// Takes fingerprints of ranges of host memory. The kernel reads the memory (see GuardedCopies), so
/// that a range which is no longer readable is told. Belongs to one thread.
class HostFingerprints {
  public:
    /// `add` is called with the number of a range and a part of its fingerprint, whose parts add
    /// up. `lose` is called with the number of a range that is not readable.
    HostFingerprints(std::function<void(std::size_t, std::uint64_t)> add,
                     std::function<void(std::size_t)> lose)
        : add_(std::move(add)), lose_(std::move(lose)) {}
    /// Adds a range. A later call takes its fingerprint. REQUIRES: more than fingerprint::kFew
    /// bytes for samples.
    void add(std::size_t number, const std::byte* memory, std::uint64_t nbytes,
             fingerprint::Words words);
    /// Takes the fingerprints that are left.
    void finish();

  private:
    /// Gathered bytes: a stretch of a range, or, with length 0, its samples.
    struct Part {
        std::size_t number;    // of the range
        std::uint64_t nbytes;  // of the range
        std::uint64_t offset;
        std::uint64_t length;
        std::size_t at = 0;  // in the gathered bytes
    };

    std::function<void(std::size_t, std::uint64_t)> add_;
    std::function<void(std::size_t)> lose_;
    GuardedCopies copies_;
    std::vector<Part> parts_;
    std::vector<std::span<const std::byte>> reads_;
    std::vector<std::size_t> readers_;  // the range of each read
    std::size_t used_ = 0;
};

}  // namespace datastates
