#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "datastates/io/descriptor_file.hpp"

namespace datastates {

/// Writes `head` and then `tail` at offset `at`, a multiple of 4096. Throws Error "io".
void write_tail(DescriptorFile& file, std::uint64_t at, std::span<const std::byte> head,
                std::span<const std::byte> tail);

}  // namespace datastates
