#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "datastates/io/file.hpp"
#include "datastates/plan.hpp"
#include "datastates/read/read_state.hpp"

/// Decides where an extent of a read lies in memory and in its file.
namespace datastates {

/// Where to read an extent directly into its destination; null if it needs a block. `cached`: it is
/// in memory already.
std::byte* in_place(const ReadState& job, const File& file, const ReadPlan::Extent& extent,
                    bool cached);

/// Begin and end of what to read of a file for an extent in a block: whole pages where direct I/O
/// is possible and few bytes are read in vain.
std::pair<std::uint64_t, std::uint64_t> widened(const ReadPlan::Extent& extent, const File& file);

}  // namespace datastates
