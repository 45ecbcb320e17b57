#pragma once

#include <cstddef>
#include <cstdint>

/// A 64-bit fingerprint over at most 32 words of a memory range. It is no checksum: it costs a few
/// cache misses and notices when a whole tensor is rewritten.
///
/// The range is cut into 8-byte words from its start; the last word is filled up with zeros. All
/// words are sampled if there are at most 32. Otherwise 32 evenly spaced words are sampled, with
/// the first and the last. The fingerprint is the sum modulo 2^64 of mix(position, word), so pieces
/// can be added in any order. The device kernel computes the same function. All functions are
/// thread-safe.
namespace datastates::fingerprint {

constexpr std::uint64_t kSamples = 32;  // one for each lane of a warp
constexpr std::uint64_t kWord = 8;

/// The fingerprint of a whole range in host memory.
std::uint64_t of(const std::byte* data, std::uint64_t nbytes);

/// The offset of sample `i` in a range of more than kSamples words.
std::uint64_t sample_offset(std::uint64_t nbytes, std::uint64_t i);

/// The fingerprint of a range of more than kSamples words. `samples` holds the sampled words end to
/// end.
std::uint64_t of_samples(std::uint64_t nbytes, const std::byte* samples);

/// Lets the processor fetch into its cache what `of` will read. Does not wait.
void prefetch(const std::byte* data, std::uint64_t nbytes);

/// The part of the fingerprint from words that begin in [offset, offset + length) of a range of
/// `nbytes`; `piece` holds these bytes. Throws Error "invalid" unless offset is a multiple of 8,
/// and length is one too or reaches the end of the range.
std::uint64_t of_piece(std::uint64_t nbytes, std::uint64_t offset, const std::byte* piece,
                       std::uint64_t length);

/// One range, as the device kernel reads it.
struct DeviceRange {
    std::uint64_t address;
    std::uint64_t nbytes;
};

/// PTX with one entry, `datastates_fingerprint(u64 ranges, u64 sums, u32 count)`. Each warp takes
/// one DeviceRange and stores its fingerprint. Launch it with blocks of kKernelThreads threads.
extern const char* const kKernelPtx;
constexpr unsigned kKernelThreads = 128;
constexpr unsigned kRangesPerKernelBlock = kKernelThreads / 32;

}  // namespace datastates::fingerprint
