#include "datastates/checksum/hash.hpp"

#include <algorithm>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "datastates/base/processor.hpp"

namespace datastates::hash {

const char* const kKernelPtx =
#include "../../kernels/hash.ptx.inc"
    ;

namespace {

__extension__ using U128 = unsigned __int128;

constexpr std::size_t kRow = 512;
constexpr std::size_t kRows = kChunk / kRow;
constexpr std::size_t kColumns = 32;
constexpr std::size_t kPasses = 4;
constexpr std::size_t kShift = 4;  // words, from pass to pass
constexpr std::size_t kMiddleWords = kColumns * kPasses * 2;
constexpr std::size_t kTerms = 6;  // a constant, four sums and the length
constexpr std::size_t kHalves = 2;
constexpr std::uint64_t kSeed = 0x3832312D686E;  // "nh-128"
// Rows that stay in the nearest cache while all columns pass over them.
constexpr std::size_t kTile = 8;

struct Keys {
    alignas(64) std::array<std::uint32_t, kShift*(kRows + kPasses - 1)> rows;
    std::array<std::uint32_t, kMiddleWords + (kShift * (kPasses - 1))> middle;
    std::array<std::array<U128, kTerms>, kHalves> end;
};

/// The next output of splitmix64.
constexpr std::uint64_t next(std::uint64_t& state) {
    state += 0x9E3779B97F4A7C15U;
    std::uint64_t x = state;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
}

template <std::size_t N>
constexpr void fill(std::array<std::uint32_t, N>& words, std::uint64_t& state) {
    for (std::size_t i = 0; i < N; i += 2) {
        const std::uint64_t two = next(state);
        words[i] = static_cast<std::uint32_t>(two);
        words[i + 1] = static_cast<std::uint32_t>(two >> 32);
    }
}

constexpr Keys kKeys = [] {
    Keys keys{};
    std::uint64_t state = kSeed;
    fill(keys.rows, state);
    fill(keys.middle, state);
    for (auto& half : keys.end) {
        for (U128& factor : half) {
            const std::uint64_t low = next(state);
            factor = (U128{next(state)} << 64) | low;
        }
    }
    return keys;
}();

/// The sums of step 1, each as two, of the first and the second pair of a row's words: those of a
/// pass lie together, by column, as vectors add to them.
using Sums = std::array<std::array<std::uint64_t, 2 * kColumns>, kPasses>;

std::uint64_t product(const std::uint32_t* words, const std::uint32_t* key) {
    return std::uint64_t{words[0] + key[0]} * (words[1] + key[1]);
}

/// Adds `count` rows, of which the first is row `row` of its chunk.
void add_scalar(Sums& sums, const std::byte* data, std::size_t row, std::size_t count) {
    for (std::size_t r = 0; r < count; ++r) {
        for (std::size_t pair = 0; pair < 2 * kColumns; ++pair) {
            std::array<std::uint32_t, 2> words{};
            std::memcpy(words.data(), data + (r * kRow) + (pair * sizeof words), sizeof words);
            const std::uint32_t* key = &kKeys.rows[(kShift * (row + r)) + (2 * (pair % 2))];
            for (std::size_t t = 0; t < kPasses; ++t) {
                sums[t][pair] += product(words.data(), key + (kShift * t));
            }
        }
    }
}

#if defined(__x86_64__)
// NOLINTBEGIN(modernize-avoid-c-arrays): GCC warns of std::array with vectors.

constexpr std::size_t kLine = 64;  // of the processor's cache

// AVX-512 was no faster on a Xeon that has it: 11.5 GB/s of memory in place of 11.1.
// Four columns, a line of the cache, pass over the rows of a tile while their sums stay in
// registers. The next tile is read ahead in the order of its addresses: in that of its use, memory
// came a sixth slower.
[[gnu::target("avx2")]] void add_avx2(Sums& sums, const std::byte* data, std::size_t row,
                                      std::size_t count) {
    for (std::size_t line = 0; line < kRow / kLine; ++line) {
        __m256i sum[kPasses][2];
        for (std::size_t t = 0; t < kPasses; ++t) {
            const auto* from = reinterpret_cast<const __m256i*>(&sums[t][line * 8]);
            for (std::size_t i = 0; i < 2; ++i) sum[t][i] = _mm256_load_si256(from + i);
        }
        for (std::size_t r = 0; r < count; ++r) {
            const std::byte* at = data + (r * kRow) + (line * kLine);
            __builtin_prefetch(data + (kTile * kRow) + (((line * count) + r) * kLine));
            const auto* key = reinterpret_cast<const __m128i*>(&kKeys.rows[kShift * (row + r)]);
            const auto* words = reinterpret_cast<const __m256i*>(at);
            const __m256i two[2] = {_mm256_loadu_si256(words), _mm256_loadu_si256(words + 1)};
            for (std::size_t t = 0; t < kPasses; ++t) {
                const __m256i keys = _mm256_broadcastsi128_si256(_mm_load_si128(key + t));
                for (std::size_t i = 0; i < 2; ++i) {
                    const __m256i x = _mm256_add_epi32(two[i], keys);
                    const __m256i y = _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32));
                    sum[t][i] = _mm256_add_epi64(sum[t][i], y);
                }
            }
        }
        for (std::size_t t = 0; t < kPasses; ++t) {
            auto* to = reinterpret_cast<__m256i*>(&sums[t][line * 8]);
            for (std::size_t i = 0; i < 2; ++i) _mm256_store_si256(to + i, sum[t][i]);
        }
    }
}

// NOLINTEND(modernize-avoid-c-arrays)
#endif

using Add = void (*)(Sums& sums, const std::byte* data, std::size_t row, std::size_t count);

/// Steps 2 and 3.
Hash finish(const Sums& sums, std::uint64_t nbytes) {
    std::array<std::uint32_t, kMiddleWords> middle{};
    for (std::size_t column = 0; column < kColumns; ++column) {
        for (std::size_t t = 0; t < kPasses; ++t) {
            const std::uint64_t sum = sums[t][2 * column] + sums[t][(2 * column) + 1];
            middle[2 * ((column * kPasses) + t)] = static_cast<std::uint32_t>(sum);
            middle[(2 * ((column * kPasses) + t)) + 1] = static_cast<std::uint32_t>(sum >> 32);
        }
    }
    std::array<std::uint64_t, kTerms - 1> terms{};
    for (std::size_t t = 0; t < kPasses; ++t) {
        for (std::size_t i = 0; i < kMiddleWords; i += 2) {
            terms[t] += product(&middle[i], &kKeys.middle[i + (kShift * t)]);
        }
    }
    terms[kPasses] = nbytes;
    Hash hash{};
    for (std::size_t half = 0; half < kHalves; ++half) {
        U128 total = kKeys.end[half][0];
        for (std::size_t i = 0; i < terms.size(); ++i) total += kKeys.end[half][i + 1] * terms[i];
        const auto upper = static_cast<std::uint64_t>(total >> 64);
        std::memcpy(hash.data() + (half * sizeof upper), &upper, sizeof upper);
    }
    return hash;
}

Hash hashed(std::span<const std::byte> chunk, Add add) {
    alignas(64) Sums sums{};
    const std::size_t rows = chunk.size() / kRow;
    for (std::size_t row = 0; row < rows; row += kTile) {
        add(sums, chunk.data() + (row * kRow), row, std::min(kTile, rows - row));
    }
    if (const std::size_t rest = chunk.size() % kRow; rest != 0) {
        std::array<std::byte, kRow> last{};
        std::memcpy(last.data(), chunk.data() + (rows * kRow), rest);
        add(sums, last.data(), rows, 1);
    }
    return finish(sums, chunk.size());
}

const Add kBest = []() noexcept -> Add {
#if defined(__x86_64__)
    if (vectors().avx2) return add_avx2;
#endif
    return add_scalar;
}();

}  // namespace

Hash of_chunk(std::span<const std::byte> chunk) { return hashed(chunk, kBest); }

Hash of_chunk_by_scalars(std::span<const std::byte> chunk) { return hashed(chunk, add_scalar); }

std::vector<std::byte> of_range(std::span<const std::byte> range) {
    std::vector<std::byte> hashes;
    hashes.reserve((range.size() + kChunk - 1) / kChunk * sizeof(Hash));
    for (std::size_t at = 0; at < range.size(); at += kChunk) {
        const Hash hash = of_chunk(range.subspan(at, std::min(kChunk, range.size() - at)));
        hashes.insert(hashes.end(), hash.begin(), hash.end());
    }
    return hashes;
}

}  // namespace datastates::hash
