#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "datastates/memory/guarded_copy.hpp"
#include "datastates/write/write_state.hpp"

namespace datastates {

/// Takes the fingerprints of a job's host sources as they are now. The kernel reads them: what is
/// gone by now is lost to the job, and nothing else happens. One thread's.
class HostFingerprints {
  public:
    explicit HostFingerprints(WriteState& job) : job_(job) {}
    void add(std::size_t source);
    /// Tells the job those that were added.
    void finish();

  private:
    struct Sampled {
        std::size_t source;
        std::uint64_t nbytes;
        std::size_t at;  // of what was read
    };

    WriteState& job_;
    GuardedCopies copies_;
    std::vector<Sampled> sampled_;
    std::vector<std::span<const std::byte>> reads_;
    std::vector<std::size_t> readers_;  // the source that each is of
    std::size_t used_ = 0;
};

}  // namespace datastates
