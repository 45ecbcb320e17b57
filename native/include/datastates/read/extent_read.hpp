#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "datastates/plan.hpp"
#include "datastates/read/device_copies.hpp"
#include "datastates/read/read_state.hpp"

/// The work of a worker on one extent of a read.
namespace datastates {

struct Finishing {
    DescriptorFile* file;  // to read the extent from, through the page cache; null: it is read
    bool in_place;         // `data` is its destination
    std::uint32_t track;   // timeline track of reading and copying
    unsigned worker;       // timeline track of verifying
};

struct Finished {
    std::uint64_t bytes_read = 0;      // here
    std::uint64_t in_place_bytes = 0;  // of these, read straight into their destination
    CopyEvents events{};               // copies to devices that may still be running
    std::uint64_t copied = 0;          // bytes of these
    Clock::time_point copies_begin{};
};

/// The longest step of a job's reads. Two steps of each worker fit into the processor's caches. A
/// copy to a device must take long beside the calls that start it. Other steps are shorter, since
/// they then need less memory.
inline std::uint64_t longest_step(const ReadState& job) {
    return std::uint64_t{job.devices().empty() ? 256U : 2048U} << 10;
}

/// The steps in which an extent is worked on.
std::vector<ReadPlan::Stretch> read_steps(const ReadState& job, const ReadPlan::Extent& extent);

/// Reads an extent to `data` if it is not there yet, verifies it, copies its pieces for host memory
/// to their destinations, and starts the copies of its pieces for devices. It copies only bytes
/// that it has verified. What it reads itself goes straight to its
/// destination, and is verified there, where it is a long stretch of host memory. The rest passes
/// through the first few megabytes of `data` only, see window_bytes(), which then stay in the
/// processor's caches. Throws Error "corrupt" for the first checksum that does not match or for a
/// file that is too short, "io" for a read that fails, and "cuda" for a copy. Then no copy is
/// running.
Finished finish_extent(ReadState& job, const ReadPlan::Extent& extent, std::byte* data,
                       const Finishing& how);

}  // namespace datastates
