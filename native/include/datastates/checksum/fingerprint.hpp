#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

/// 64-bit fingerprints of memory ranges. They are no checksums: nothing stores them.
///
/// A range is cut into 8-byte words from its start; the last word is filled up with zeros. A
/// fingerprint is the sum modulo 2^64 of mix(position, word) over some words, so pieces can be
/// added in any order.
///
/// - A whole fingerprint is over all words. It reads at the speed of memory, and differs where any
///   byte differs, but for one case in 2^64.
/// - A sampled one is over 32 evenly spaced words, with the first and the last. It costs a few
/// cache
///   misses and notices when a whole tensor is rewritten.
///
/// A kernel computes whole ones on a device. All functions are thread-safe.
namespace datastates::fingerprint {

constexpr std::uint64_t kSamples = 32;
constexpr std::uint64_t kWord = 8;
/// Up to this many bytes, a range has no sampled fingerprint. One read brings all words, and takes
/// no longer than reads of the samples.
constexpr std::uint64_t kFew = std::uint64_t{4} << 10;

/// The whole fingerprint of words that lie end to end, the first of them at `position`. The whole
/// fingerprint of a range is the sum over its pieces, all but the last of whole words.
std::uint64_t whole(std::uint64_t position, const std::byte* data, std::uint64_t nbytes);

/// The offset of sample `i` in a range of more than kFew bytes.
std::uint64_t sample_offset(std::uint64_t nbytes, std::uint64_t i);

/// The sampled fingerprint of a range of more than kFew bytes. `samples` holds the sampled words
/// end to end.
std::uint64_t of_samples(std::uint64_t nbytes, const std::byte* samples);

/// Lets the processor fetch into its cache the samples of a range, or all of a short one. Does not
/// wait.
void prefetch(const std::byte* data, std::uint64_t nbytes);

/// Which words of a range a fingerprint is over.
enum class Words : std::uint8_t { all, samples };

/// The part of a fingerprint from words that begin in [offset, offset + length) of a range of
/// `nbytes`; `piece` holds these bytes. Throws Error "invalid" unless offset is a multiple of 8,
/// and length is one too or reaches the end of the range.
std::uint64_t of_piece(Words words, std::uint64_t nbytes, std::uint64_t offset,
                       const std::byte* piece, std::uint64_t length);

/// Words that lie end to end in device memory, as the kernel reads them.
struct DeviceWords {
    std::uint64_t address;
    std::uint64_t nbytes;
    std::uint64_t position = 0;  // of the first word
};

/// PTX with one entry, `datastates_whole(u64 words, u64 sums, u32 count)`. Each warp takes one
/// DeviceWords and stores its whole fingerprint. Launch it with blocks of kKernelThreads threads.
std::string whole_ptx();
constexpr unsigned kKernelThreads = 128;
constexpr unsigned kRangesPerKernelBlock = kKernelThreads / 32;

}  // namespace datastates::fingerprint
