#pragma once

#include <cstddef>
#include <cstdint>

/// A 64-bit fingerprint over a few dozen words of a memory range: not a checksum, but a witness
/// that sees what rewrites a whole tensor, for the price of a few cache misses.
///
/// The range is cut into 8-byte words from its start, the last one filled up with zeros. Sampled
/// are all of them when there are at most 32, else 32 evenly spaced ones, the first and the last
/// among them. The fingerprint is the sum modulo 2^64 of mix(position, word), so pieces can be
/// added up in any order. The device kernel computes the same function.
namespace datastates::fingerprint {

constexpr std::uint64_t kSamples = 32;  // one for each lane of a warp
constexpr std::uint64_t kWord = 8;

/// Of a whole range in host memory.
std::uint64_t of(const std::byte* data, std::uint64_t nbytes);

/// Where the word of sample `i` begins in a range of more than kSamples words.
std::uint64_t sample_offset(std::uint64_t nbytes, std::uint64_t i);

/// Of a whole range of more than kSamples words, from the sampled words alone, one after the other.
std::uint64_t of_samples(std::uint64_t nbytes, const std::byte* samples);

/// Fetches what `of` will read into the processor's cache, while it does something else.
void prefetch(const std::byte* data, std::uint64_t nbytes);

/// The part that comes from the words beginning in [offset, offset + length) of a range of
/// `nbytes`. REQUIRES: offset is a multiple of 8, and length is one too or reaches the range's end;
/// else Error "invalid".
std::uint64_t of_piece(std::uint64_t nbytes, std::uint64_t offset, const std::byte* piece,
                       std::uint64_t length);

/// What the device kernel is told about each range.
struct DeviceRange {
    std::uint64_t address;
    std::uint64_t nbytes;
};

/// PTX with one entry, `datastates_fingerprint(u64 ranges, u64 sums, u32 count)`: one warp takes
/// one DeviceRange and stores its fingerprint. Launch with blocks of kKernelThreads.
extern const char* const kKernelPtx;
constexpr unsigned kKernelThreads = 128;
constexpr unsigned kRangesPerKernelBlock = kKernelThreads / 32;

}  // namespace datastates::fingerprint
