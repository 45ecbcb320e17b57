// The kernel of nh-128, which include/datastates/checksum/hash.hpp describes. .ci/build-ptx makes
// hash.ptx.inc of it.

using U32 = unsigned int;
using U64 = unsigned long long;
using U128 = unsigned __int128;

constexpr U32 kThreads = 128;
constexpr U32 kBlocks = 8;  // of a multiprocessor at a time, as registers allow
constexpr U32 kRow = 512;
constexpr U32 kRows = 512;
constexpr U32 kPasses = 4;
constexpr U32 kTerms = 6;
constexpr U32 kUnrolled = 4;  // rows whose words are on their way at a time
constexpr U64 kSeed = 0x3832312D686E;
// Where the keys of the steps begin, in outputs of splitmix64. Four words are two outputs.
constexpr U32 kMiddle = 2 * (kRows + kPasses - 1);
constexpr U32 kEnd = kMiddle + 128 + (2 * (kPasses - 1));
constexpr U32 kKeys = kEnd + (2 * 2 * kTerms);

struct Chunk {
    U64 address;
    U64 nbytes;
};

__device__ U64 splitmix64(U32 output) {
    U64 x = kSeed + ((output + 1) * 0x9E3779B97F4A7C15U);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
}

__device__ U64 products(uint4 words, uint4 key) {
    return (U64{words.x + key.x} * (words.y + key.y)) + (U64{words.z + key.z} * (words.w + key.w));
}

/// Adds a lane's words of a row. `keys` are those of the passes.
__device__ void add(U64 (&sums)[kPasses], uint4 words, const uint4 (&keys)[kPasses]) {
    for (U32 t = 0; t < kPasses; ++t) sums[t] += products(words, keys[t]);
}

/// Words at any address, each put together from the two aligned words that it lies in.
struct Words {
    const U32* aligned;
    U32 shift;    // bits of the first aligned word that are not the chunk's
    U64 covered;  // bytes from `aligned` to the chunk's end

    __device__ Words(U64 address, U64 nbytes)
        : aligned(reinterpret_cast<const U32*>(address & ~U64{3})),
          shift(8 * (address & 3)),
          covered((address & 3) + nbytes) {}

    /// Four words, all of them the chunk's.
    __device__ uint4 whole(U32 word) const {
        const U32* from = aligned + word;
        const U32 w[5] = {__ldca(from), __ldca(from + 1), __ldca(from + 2), __ldca(from + 3),
                          shift == 0 ? 0 : __ldca(from + 4)};
        return {__funnelshift_r(w[0], w[1], shift), __funnelshift_r(w[1], w[2], shift),
                __funnelshift_r(w[2], w[3], shift), __funnelshift_r(w[3], w[4], shift)};
    }
    /// Four words, of which some may lie behind the chunk, or in part: zeros there.
    __device__ uint4 some(U32 word) const {
        return {one(word), one(word + 1), one(word + 2), one(word + 3)};
    }

  private:
    __device__ U32 at(U32 word) const {
        return U64{4} * word < covered ? __ldca(aligned + word) : 0;
    }
    __device__ U32 one(U32 word) const {
        const U32 whole = __funnelshift_r(at(word), at(word + 1), shift);
        const U64 begin = (U64{4} * word) + (shift / 8);
        if (begin >= covered) return 0;
        const U64 left = covered - begin;
        return left >= 4 ? whole : whole & ((1U << (8 * left)) - 1);
    }
};

/// Adds whole rows, some at a time, and returns how many.
template <typename Load>
__device__ U32 add_rows(U64 (&sums)[kPasses], U32 rows, const uint4* keys, Load load) {
    U32 row = 0;
    uint4 key[kPasses] = {{}, keys[0], keys[1], keys[2]};
    for (; row + kUnrolled <= rows; row += kUnrolled) {
        uint4 words[kUnrolled];
        for (U32 i = 0; i < kUnrolled; ++i) words[i] = load(row + i);
        for (U32 i = 0; i < kUnrolled; ++i) {
            for (U32 t = 1; t < kPasses; ++t) key[t - 1] = key[t];
            key[kPasses - 1] = keys[row + i + kPasses - 1];
            add(sums, words[i], key);
        }
    }
    return row;
}

/// Step 1 for a lane's column.
__device__ void add_chunk(U64 (&sums)[kPasses], const Chunk& chunk, U32 lane, const uint4* keys) {
    const U32 rows = chunk.nbytes / kRow;
    const Words words(chunk.address, chunk.nbytes);
    U32 row = 0;
    if (chunk.address % sizeof(uint4) == 0) {
        const uint4* column = reinterpret_cast<const uint4*>(chunk.address) + lane;
        row = add_rows(sums, rows, keys, [&](U32 r) { return __ldcs(column + (32 * r)); });
    } else {
        row =
            add_rows(sums, rows, keys, [&](U32 r) { return words.whole((128 * r) + (4 * lane)); });
    }
    const U32 all = (chunk.nbytes + kRow - 1) / kRow;
#pragma unroll 1
    for (; row < all; ++row) {
        const uint4 key[kPasses] = {keys[row], keys[row + 1], keys[row + 2], keys[row + 3]};
        add(sums, words.some((128 * row) + (4 * lane)), key);
    }
}

/// Step 2: a lane's share, then the sum over all lanes, in the first one.
__device__ void add_columns(U64 (&sums)[kPasses], U32 lane, const uint4* keys) {
    const uint4 words[2] = {{U32(sums[0]), U32(sums[0] >> 32), U32(sums[1]), U32(sums[1] >> 32)},
                            {U32(sums[2]), U32(sums[2] >> 32), U32(sums[3]), U32(sums[3] >> 32)}};
    for (U32 t = 0; t < kPasses; ++t) {
        const uint4* key = keys + (2 * lane) + t;
        sums[t] = products(words[0], key[0]) + products(words[1], key[1]);
        for (U32 lanes = 16; lanes > 0; lanes /= 2) {
            sums[t] += __shfl_down_sync(0xFFFFFFFF, sums[t], lanes);
        }
    }
}

/// Step 3: one half.
__device__ U64 upper(const U64 (&sums)[kPasses], U64 nbytes, const U64* keys) {
    const auto key = [&](U32 i) { return (U128{keys[(2 * i) + 1]} << 64) | keys[2 * i]; };
    U128 total = key(0) + (key(kTerms - 1) * nbytes);
    for (U32 t = 0; t < kPasses; ++t) total += key(t + 1) * sums[t];
    return total >> 64;
}

extern "C" __global__ void __launch_bounds__(kThreads, kBlocks)
    datastates_hash(const Chunk* chunks, ulonglong2* hashes, U32 count) {
    __shared__ alignas(16) U64 keys[kKeys];
    for (U32 i = threadIdx.x; i < kKeys; i += kThreads) keys[i] = splitmix64(i);
    __syncthreads();
    const U32 lane = threadIdx.x % 32;
    // Neighbours are of different blocks: a few chunks are spread over the whole device.
    for (U32 i = ((threadIdx.x / 32) * gridDim.x) + blockIdx.x; i < count;
         i += gridDim.x * (kThreads / 32)) {
        const Chunk chunk = chunks[i];
        U64 sums[kPasses] = {};
        add_chunk(sums, chunk, lane, reinterpret_cast<const uint4*>(keys));
        add_columns(sums, lane, reinterpret_cast<const uint4*>(keys + kMiddle));
        if (lane != 0) continue;
        hashes[i] = {upper(sums, chunk.nbytes, keys + kEnd),
                     upper(sums, chunk.nbytes, keys + kEnd + (2 * kTerms))};
    }
}
