#pragma once

#include <cstddef>
#include <cstdint>

#include "datastates/plan.hpp"
#include "datastates/read_state.hpp"

/// What workers do with the bytes of one extent of a read. `data` is where its first byte is, or
/// goes; `worker` and `track` are rows of the job's timeline.
namespace datastates {

/// Compares all checksums. Throws Error "corrupt" for the first that does not match.
void verify_extent(ReadState& job, const ReadPlan::Extent& extent, const std::byte* data,
                   unsigned worker);

/// Reads the spans of an extent through the page cache, in steps that stay in the processor's
/// cache, each verified right after. Returns the bytes read; throws like `verify_extent` and for
/// failing reads.
std::uint64_t read_through_cache(ReadState& job, const ReadPlan::Extent& extent, std::byte* data,
                                 std::uint32_t track, unsigned worker);

/// Copies the parts of an extent that go to host memory.
void copy_to_host(ReadState& job, const ReadPlan::Extent& extent, const std::byte* data,
                  std::uint32_t track);

}  // namespace datastates
