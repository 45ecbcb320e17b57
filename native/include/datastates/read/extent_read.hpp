#pragma once

#include <cstddef>
#include <cstdint>

#include "datastates/plan.hpp"
#include "datastates/read/device_copies.hpp"
#include "datastates/read/read_state.hpp"

/// The work of a worker on one extent of a read.
namespace datastates {

struct Finishing {
    File& file;           // to read the extent from
    bool through_cache;   // read the extent here, through the page cache
    bool in_place;        // `data` is its destination
    std::uint32_t track;  // timeline track of reading and copying
    unsigned worker;      // timeline track of verifying
};

struct Finished {
    std::uint64_t bytes_read = 0;  // here
    CopyEvents events{};           // copies to devices that may still be running
    std::uint64_t copied = 0;      // bytes of these
    Clock::time_point copies_begin{};
};

/// Reads an extent to `data` if it is not there yet, verifies it, copies its pieces for host memory
/// to their destinations, and starts the copies of its pieces for devices. It copies only bytes
/// that it has verified. What it reads itself passes through the first few megabytes of `data`
/// only, which then stay in the processor's caches. Throws Error "corrupt" for the first checksum
/// that does not match or for a file that is too short, Error "io" for a read that fails, and Error
/// "cuda" for a copy; then no copy is running.
Finished finish_extent(ReadState& job, const ReadPlan::Extent& extent, std::byte* data,
                       const Finishing& how);

}  // namespace datastates
