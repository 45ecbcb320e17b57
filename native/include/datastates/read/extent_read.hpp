#pragma once

#include <cstddef>
#include <cstdint>

#include "datastates/plan.hpp"
#include "datastates/read/read_state.hpp"

/// What workers do with the bytes of one extent of a read.
namespace datastates {

struct Finishing {
    bool through_cache;   // it is still to be read, through the page cache
    bool in_place;        // it has been read, or is, to where it goes
    std::uint32_t track;  // rows of the job's timeline
    unsigned worker;
};

/// Brings the bytes of an extent to `data`, if they are not there, verifies them and copies those
/// that go to host memory: in steps that stay in the processor's cache, and nothing is copied that
/// has not been verified. Returns the bytes read here. Throws Error "corrupt" for the first
/// checksum that does not match, and for failing reads.
std::uint64_t finish_extent(ReadState& job, const ReadPlan::Extent& extent, std::byte* data,
                            const Finishing& how);

}  // namespace datastates
