#include "datastates/checksum/fingerprint.hpp"

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "datastates/base/error.hpp"
#include "datastates/base/processor.hpp"

namespace datastates::fingerprint {
namespace {

constexpr std::uint64_t kLine = 64;  // of the processor's cache
constexpr std::uint64_t kKeyStep = 0x9E3779B97F4A7C15U;

// splitmix64's finalizer over the word plus a multiple of its position. Cheaper mixes cancel out in
// a sum: a product of the word's halves, with the same multiples as keys, does where four equal
// words change alike.
[[gnu::always_inline]] inline std::uint64_t mix(std::uint64_t position, std::uint64_t word) {
    std::uint64_t x = word + ((position + 1) * kKeyStep);
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
    return x ^ (x >> 31);
}

std::uint64_t load(const std::byte* data, std::uint64_t left) {
    std::uint64_t word = 0;
    if (left >= kWord) {  // the usual case, and one instruction
        std::memcpy(&word, data, kWord);
    } else {
        std::memcpy(&word, data, left);
    }
    return word;
}

/// The sum over `count` whole words that lie end to end, the first of them at `position`.
[[gnu::always_inline]] inline std::uint64_t sum_words(std::uint64_t position, const std::byte* data,
                                                      std::uint64_t count) {
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < count; ++i) {
        std::uint64_t word = 0;
        std::memcpy(&word, data + (i * kWord), kWord);
        sum += mix(position + i, word);
    }
    return sum;
}

#if defined(__x86_64__)
// Compiled for AVX-512, with eight 64-bit multiplications at a time: it takes a quarter of the
// time.
[[gnu::target("avx512dq")]] std::uint64_t sum_words_wide(std::uint64_t position,
                                                         const std::byte* data,
                                                         std::uint64_t count) {
    return sum_words(position, data, count);
}

const bool kWide = vectors().avx512dq;
#endif

std::uint64_t sum_run(std::uint64_t position, const std::byte* data, std::uint64_t count) {
#if defined(__x86_64__)
    if (kWide) return sum_words_wide(position, data, count);
#endif
    return sum_words(position, data, count);
}

/// The index of sample i among `last + 1` words.
std::uint64_t position_of(std::uint64_t i, std::uint64_t last) { return i * last / (kSamples - 1); }

// Adds mix() of one word, whose key lies $ahead behind %key.
constexpr const char* kMix = R"ptx(
    add.u64 %k, %key, $ahead;
    add.u64 %word$i, %word$i, %k;
    shr.u64 %other, %word$i, 30;
    xor.b64 %word$i, %word$i, %other;
    mul.lo.u64 %word$i, %word$i, 0xBF58476D1CE4E5B9U;
    shr.u64 %other, %word$i, 27;
    xor.b64 %word$i, %word$i, %other;
    mul.lo.u64 %word$i, %word$i, 0x94D049BB133111EBU;
    shr.u64 %other, %word$i, 31;
    xor.b64 %word$i, %word$i, %other;
    add.u64 %sum, %sum, %word$i;
)ptx";

constexpr const char* kKernel = R"ptx(
.version 6.5
.target sm_50
.address_size 64

.visible .entry datastates_whole(
    .param .u64 ranges,
    .param .u64 sums,
    .param .u32 count)
{
    .reg .pred %outside, %more, %odd;
    .reg .b32 %block, %blockdim, %inblock, %thread, %range, %lane, %count, %bits, %low, %high, %otherlow,
              %otherhigh, %shift, %back;
    .reg .b64 %ranges, %sums, %entry, %base, %nbytes, %position, %lane64, %at, %end, %last, %left,
              %address, %key, %next, %word<8>, %sum, %x, %other, %k, %range64;

    mov.u32 %block, %ctaid.x;
    mov.u32 %blockdim, %ntid.x;
    mov.u32 %inblock, %tid.x;
    mad.lo.u32 %thread, %block, %blockdim, %inblock;
    shr.u32 %range, %thread, 5;
    and.b32 %lane, %thread, 31;
    ld.param.u32 %count, [count];
    setp.ge.u32 %outside, %range, %count;
    @%outside bra DONE;

    ld.param.u64 %ranges, [ranges];
    ld.param.u64 %sums, [sums];
    cvt.u64.u32 %range64, %range;
    cvt.u64.u32 %lane64, %lane;
    mul.lo.u64 %entry, %range64, 24;
    add.u64 %entry, %entry, %ranges;
    ld.global.u64 %base, [%entry];
    ld.global.u64 %nbytes, [%entry+8];
    ld.global.u64 %position, [%entry+16];
    add.u64 %position, %position, 1;
    mov.u64 %sum, 0;
    and.b64 %end, %nbytes, -8;
    and.b64 %x, %base, 15;
    setp.ne.u64 %odd, %x, 0;
    mov.u64 %at, 0;
    @%odd bra WORDS;

    // Four times two words of each lane: 2048 bytes of a warp.
    shl.b64 %at, %lane64, 4;
    shr.u64 %k, %at, 3;
    add.u64 %k, %k, %position;
    mul.lo.u64 %key, %k, $key;
    add.u64 %last, %at, 1552;
    setp.gt.u64 %more, %last, %end;
    @%more bra WIDELEFT;
WIDE:
    add.u64 %address, %base, %at;
    ld.global.v2.u64 {%word0, %word1}, [%address];
    ld.global.v2.u64 {%word2, %word3}, [%address+512];
    ld.global.v2.u64 {%word4, %word5}, [%address+1024];
    ld.global.v2.u64 {%word6, %word7}, [%address+1536];
$mix0$mix1$mix2$mix3$mix4$mix5$mix6$mix7
    add.u64 %key, %key, $step256;
    add.u64 %at, %at, 2048;
    add.u64 %last, %last, 2048;
    setp.le.u64 %more, %last, %end;
    @%more bra WIDE;

    // The lanes leave the loop together or one turn apart. The rest goes by pairs of words.
WIDELEFT:
    add.u64 %last, %at, 16;
    setp.gt.u64 %more, %last, %end;
    @%more bra PAIRSDONE;
PAIR:
    add.u64 %address, %base, %at;
    ld.global.v2.u64 {%word0, %word1}, [%address];
$mix0$mix1
    add.u64 %key, %key, $step64;
    add.u64 %at, %at, 512;
    add.u64 %last, %last, 512;
    setp.le.u64 %more, %last, %end;
    @%more bra PAIR;
PAIRSDONE:
    // An odd word is left to the lane that it would be the first word of.
    setp.ge.u64 %more, %at, %end;
    @%more bra TAIL;
    add.u64 %address, %base, %at;
    ld.global.u64 %word0, [%address];
$mix0
    bra TAIL;

    // Memory that is not aligned to 16 bytes: each word is put together from the two that it lies in.
WORDS:
    shl.b64 %at, %lane64, 3;
    add.u64 %k, %lane64, %position;
    mul.lo.u64 %key, %k, $key;
    and.b64 %x, %base, 7;
    setp.ne.u64 %odd, %x, 0;
    cvt.u32.u64 %shift, %x;
    shl.b32 %shift, %shift, 3;
    sub.u32 %back, 64, %shift;
    sub.u64 %base, %base, %x;
    setp.ge.u64 %more, %at, %end;
    @%more bra WORDSDONE;
WORD:
    add.u64 %address, %base, %at;
    ld.global.u64 %word0, [%address];
    mov.u64 %word1, 0;
    @%odd ld.global.u64 %word1, [%address+8];
    shr.b64 %word0, %word0, %shift;
    shl.b64 %word1, %word1, %back;
    or.b64 %word0, %word0, %word1;
$mix0
    add.u64 %key, %key, $step32;
    add.u64 %at, %at, 256;
    setp.lt.u64 %more, %at, %end;
    @%more bra WORD;
WORDSDONE:
    add.u64 %base, %base, %x;

    // Less than a word: the first lane reads its bytes.
TAIL:
    sub.u64 %left, %nbytes, %end;
    setp.eq.u64 %more, %left, 0;
    @%more bra REDUCE;
    setp.ne.u32 %more, %lane, 0;
    @%more bra REDUCE;
    shr.u64 %k, %end, 3;
    add.u64 %k, %k, %position;
    mul.lo.u64 %key, %k, $key;
    add.u64 %address, %base, %end;
    mov.u64 %word0, 0;
    mov.u32 %shift, 0;
BYTE:
    ld.global.u8 %x, [%address];
    shl.b64 %x, %x, %shift;
    or.b64 %word0, %word0, %x;
    add.u64 %address, %address, 1;
    add.u32 %shift, %shift, 8;
    sub.u64 %left, %left, 1;
    setp.ne.u64 %more, %left, 0;
    @%more bra BYTE;
$mix0

REDUCE:
    mov.u32 %bits, 16;
STEP:
    mov.b64 {%low, %high}, %sum;
    shfl.sync.down.b32 %otherlow, %low, %bits, 31, 0xffffffff;
    shfl.sync.down.b32 %otherhigh, %high, %bits, 31, 0xffffffff;
    mov.b64 %other, {%otherlow, %otherhigh};
    add.u64 %sum, %sum, %other;
    shr.u32 %bits, %bits, 1;
    setp.gt.u32 %more, %bits, 0;
    @%more bra STEP;

    setp.ne.u32 %more, %lane, 0;
    @%more bra DONE;
    shl.b64 %entry, %range64, 3;
    add.u64 %entry, %entry, %sums;
    st.global.u64 [%entry], %sum;
DONE:
    ret;
}
)ptx";

void replace_all(std::string& text, std::string_view blank, const std::string& value) {
    for (auto at = text.find(blank); at != std::string::npos; at = text.find(blank)) {
        text.replace(at, blank.size(), value);
    }
}

std::string mix_of(unsigned word) {
    // Words come in pairs, and a warp reads 32 of these at once.
    const std::uint64_t words = (word / 2 * 64) + (word % 2);
    std::string text = kMix;
    replace_all(text, "$ahead", std::to_string(words * kKeyStep));
    replace_all(text, "$i", std::to_string(word));
    return text;
}

}  // namespace

std::uint64_t whole(std::uint64_t position, const std::byte* data, std::uint64_t nbytes) {
    const std::uint64_t words = nbytes / kWord;
    const std::uint64_t sum = sum_run(position, data, words);
    const std::uint64_t left = nbytes % kWord;
    return left == 0 ? sum : sum + mix(position + words, load(data + (words * kWord), left));
}

std::uint64_t sample_offset(std::uint64_t nbytes, std::uint64_t i) {
    return position_of(i, ((nbytes + kWord - 1) / kWord) - 1) * kWord;
}

std::uint64_t of_samples(std::uint64_t nbytes, const std::byte* samples) {
    const std::uint64_t last = ((nbytes + kWord - 1) / kWord) - 1;
    std::uint64_t sum = 0;
    for (std::uint64_t i = 0; i < kSamples; ++i) {
        const std::uint64_t position = position_of(i, last);
        sum += mix(position, load(samples + (i * kWord), nbytes - (position * kWord)));
    }
    return sum;
}

void prefetch(const std::byte* data, std::uint64_t nbytes) {
    if (nbytes == 0) return;
    if (nbytes <= kFew) {
        for (std::uint64_t at = 0; at < nbytes; at += kLine) __builtin_prefetch(data + at);
        return;
    }
    const std::uint64_t last = ((nbytes + kWord - 1) / kWord) - 1;
    for (std::uint64_t i = 0; i < kSamples; ++i) {
        __builtin_prefetch(data + (position_of(i, last) * kWord));
    }
}

std::uint64_t of_piece(Words words, std::uint64_t nbytes, std::uint64_t offset,
                       const std::byte* piece, std::uint64_t length) {
    if (offset > nbytes || length > nbytes - offset || offset % kWord != 0 ||
        (length % kWord != 0 && offset + length != nbytes)) {
        throw Error::invalid("piece [" + std::to_string(offset) + ", +" + std::to_string(length) +
                             ") of " + std::to_string(nbytes) + " bytes cuts a word of 8 bytes");
    }
    const std::uint64_t first = offset / kWord;
    if (words == Words::all) return whole(first, piece, length);
    const std::uint64_t end = (offset + length + kWord - 1) / kWord;
    const std::uint64_t last = ((nbytes + kWord - 1) / kWord) - 1;
    std::uint64_t sum = 0;
    // The first sample that is not before `first`.
    std::uint64_t i = first == 0 ? 0 : ((first * (kSamples - 1)) + last - 1) / last;
    for (; i < kSamples; ++i) {
        const std::uint64_t position = position_of(i, last);
        if (position >= end) break;
        const std::uint64_t at = (position * kWord) - offset;
        sum += mix(position, load(piece + at, length - at));
    }
    return sum;
}

std::string whole_ptx() {
    std::string text = kKernel;
    for (const unsigned words : {32U, 64U, 256U}) {
        replace_all(text, "$step" + std::to_string(words), std::to_string(words * kKeyStep));
    }
    for (unsigned word = 0; word < 8; ++word) {
        replace_all(text, "$mix" + std::to_string(word), mix_of(word));
    }
    replace_all(text, "$key", std::to_string(kKeyStep));
    return text;
}

}  // namespace datastates::fingerprint
