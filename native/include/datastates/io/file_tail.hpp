#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "datastates/io/file.hpp"

namespace datastates {

/// Writes `head`, and `tail` behind it, from `at` on, and ends the file there. `at` is a multiple
/// of 4096.
void write_tail(File& file, std::uint64_t at, std::span<const std::byte> head,
                std::span<const std::byte> tail);

}  // namespace datastates
