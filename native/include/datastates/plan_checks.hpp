#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace datastates {

// Sums of a few values below this cannot overflow, and off_t holds them.
constexpr std::uint64_t kLimit = std::uint64_t{1} << 62;

/// Throws Error "invalid" with `what` and the index of the entry that is wrong.
void require(bool condition, const char* what, std::size_t index);

void require_size(std::size_t actual, std::size_t expected, const char* name);

/// Checks a CSR index: it begins at 0, never falls, and ends at `total`.
void require_index(std::span<const std::uint64_t> index, std::size_t rows, std::size_t total,
                   const char* name);

bool within(std::uint64_t offset, std::uint64_t length, std::uint64_t total);

/// Whether `count` stretches, of which each begins `step` behind the last one, do not overlap and
/// lie within `total` bytes.
bool spaced_within(std::uint64_t offset, std::uint64_t length, std::uint64_t count,
                   std::uint64_t step, std::uint64_t total);

}  // namespace datastates
