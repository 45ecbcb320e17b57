#pragma once

#include <cstddef>
#include <cstdint>

namespace datastates {

/// Bytes of a page of memory and of the page cache: 4096 on x86-64, up to 65536 elsewhere. The
/// alignment of extents and of direct I/O does not depend on it.
std::size_t page_size();

/// How many pages of `page` bytes a range that is not empty touches.
constexpr std::uint64_t pages_touched(std::uint64_t offset, std::uint64_t length,
                                      std::size_t page) {
    return ((offset + length - 1) / page) - (offset / page) + 1;
}

}  // namespace datastates
