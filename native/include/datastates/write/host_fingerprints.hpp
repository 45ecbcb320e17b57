#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "datastates/memory/guarded_copy.hpp"
#include "datastates/write/write_state.hpp"

namespace datastates {

/// Takes the fingerprints of a job's host sources at submit. The kernel reads the memory (see
/// GuardedCopies); a source that is no longer readable is marked as lost. Belongs to one thread.
class HostFingerprints {
  public:
    explicit HostFingerprints(WriteState& job) : job_(job) {}
    /// Adds a source. A later call takes its fingerprint.
    void add(std::size_t source);
    /// Takes the fingerprints that are left and stores them in the job.
    void finish();

  private:
    /// Gathered bytes: a stretch of a source, or, with length 0, its samples.
    struct Part {
        std::size_t source;
        std::uint64_t nbytes;  // of the source
        std::uint64_t offset;
        std::uint64_t length;
        std::size_t at = 0;  // in the gathered bytes
    };

    WriteState& job_;
    GuardedCopies copies_;
    std::vector<Part> parts_;
    std::vector<std::span<const std::byte>> reads_;
    std::vector<std::size_t> readers_;  // the source of each read
    std::size_t used_ = 0;
};

}  // namespace datastates
