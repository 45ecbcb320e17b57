#pragma once

#include <cstddef>
#include <cstdint>

#include "datastates/plan.hpp"
#include "datastates/read/read_state.hpp"

/// The work of a worker on one extent of a read.
namespace datastates {

struct Finishing {
    bool through_cache;   // read the extent here, through the page cache
    bool in_place;        // `data` is its destination
    std::uint32_t track;  // timeline track of reading and copying
    unsigned worker;      // timeline track of verifying
};

/// Reads an extent to `data` if it is not there yet, verifies it, and copies its pieces for host
/// memory to their destinations. It works in steps that stay in the processor's cache, and copies
/// only bytes that it has verified. Returns the bytes read here. Throws Error "corrupt" for the
/// first checksum that does not match or for a file that is too short, and Error "io" for a read
/// that fails.
std::uint64_t finish_extent(ReadState& job, const ReadPlan::Extent& extent, std::byte* data,
                            const Finishing& how);

}  // namespace datastates
