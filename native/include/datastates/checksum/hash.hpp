#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

/// `nh-128`: a hash of 128 bits of each chunk of a range of memory. It decides whether bytes have
/// changed, and is the same function on the host and on a device. All functions are thread-safe.
///
/// A chunk is cut into rows of 512 bytes, the last one filled up with zeros; a row into 32 columns
/// of four little-endian 32-bit words. Words are added modulo 2^32, the rest modulo 2^64.
///
/// 1. For each column, four sums: sum t is over the rows r and p = 0, 1 of
///    (w[2p] + k[4(r+t)+2p]) * (w[2p+1] + k[4(r+t)+2p+1]).
/// 2. The sums of all columns end to end are 256 words m, low halves first. From them four sums:
///    sum t is over the pairs i of (m[2i] + q[2i+4t]) * (m[2i+1] + q[2i+1+4t]).
/// 3. Two halves, each the upper 64 bits of a0 + a1 s0 + a2 s1 + a3 s2 + a4 s3 + a5 n modulo 2^128,
///    where s are the sums of step 2, and n is the length in bytes. Little-endian.
///
/// The keys are outputs of splitmix64, one after the other: k, q (two words each, low half first),
/// then the twelve a (low half first).
///
/// Why it tells changes: for random keys, two chunks that differ, of any lengths, have the same
/// hash with less than 2^-126.
/// - Step 1 is NH with four Toeplitz passes of 32 bits (UMAC: Black, Halevi, Krawczyk, Krovetz,
///   Rogaway, CRYPTO 1999). Let columns differ in some pairs of words. The last of these meets, in
///   each pass, a pair of keys that no earlier pass has met there or before, as a shift is by whole
///   pairs. So each pass has the same sum for both with at most 2^-32 whatever the others have.
/// - Step 2 is the same function, of words that differ if the sums of step 1 do: again 2^-128.
/// - Each half of step 3 is strongly universal for s and n together (multilinear: Dietzfelbinger
///   1996, Lemire and Kaser 2014): 2^-64 each, with keys of its own.
///
/// What is heuristic: the keys are not random, but fixed and known. The bound is for bytes that
/// nobody has chosen with them in mind.
namespace datastates::hash {

/// The bytes of a chunk; only the last chunk of a range may be shorter.
constexpr std::size_t kChunk = std::size_t{256} << 10;

using Hash = std::array<std::byte, 16>;

/// The hash of one chunk of at most kChunk bytes. It reads about as fast as memory does.
Hash of_chunk(std::span<const std::byte> chunk);
/// The same without vectors, as other processors than x86 with AVX2 compute it.
Hash of_chunk_by_scalars(std::span<const std::byte> chunk);

/// The hashes of a range's chunks, end to end. An empty range has none.
std::vector<std::byte> of_range(std::span<const std::byte> range);

/// A chunk in device memory, as the kernel reads it.
struct DeviceChunk {
    std::uint64_t address;
    std::uint64_t nbytes;
};

/// PTX with one entry, `datastates_hash(u64 chunks, u64 hashes, u32 count)`. Each warp takes one
/// DeviceChunk after the other and stores its Hash. It reads no 4-byte word that holds no byte of a
/// chunk. Launch it with blocks of kKernelThreads threads.
extern const char* const kKernelPtx;
constexpr unsigned kKernelThreads = 128;
constexpr unsigned kChunksPerKernelBlock = kKernelThreads / 32;

}  // namespace datastates::hash
