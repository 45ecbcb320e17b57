#include "datastates/memory/gather.hpp"

#include <algorithm>
#include <initializer_list>
#include <string_view>
#include <utility>

namespace datastates::gather {
namespace {

constexpr unsigned kLanes = 32;
// The number of words that a lane loads before it stores them.
constexpr unsigned kUnrolled = 4;

/// The unit that a lane loads and stores at once.
struct Word {
    unsigned bytes;
    const char* type;
    unsigned registers;
};
constexpr Word k16Bytes = {.bytes = 16, .type = "v4.u32", .registers = 4};
constexpr Word k8Bytes = {.bytes = 8, .type = "v2.u32", .registers = 2};
constexpr Word k4Bytes = {.bytes = 4, .type = "u32", .registers = 1};
constexpr Word kByte = {.bytes = 1, .type = "u8", .registers = 1};

constexpr const char* kStep = R"ptx(
$label:
    add.u64 %last, %at, $span;
    setp.gt.u64 %beyond, %last, %limit;
    @%beyond bra $otherwise;
    add.u64 %source, %from, %at;
    add.u64 %dest, %to, %at;
$loads$stores    add.u64 %at, %at, $stride;
    bra $label;
)ptx";

constexpr const char* kAligned = R"ptx(
BY$bytes:
    and.b64 %low, %bits, $bytes - 1;
    setp.ne.u64 %beyond, %low, 0;
    @%beyond bra $otherwise;
    and.b64 %limit, %nbytes, -$bytes;
    mul.lo.u64 %at, %lane64, $bytes;
)ptx";

using Blanks = std::initializer_list<std::pair<std::string_view, std::string>>;

std::string filled(std::string text, Blanks blanks) {
    for (const auto& [blank, value] : blanks) {
        for (auto at = text.find(blank); at != std::string::npos; at = text.find(blank)) {
            text.replace(at, blank.size(), value);
        }
    }
    return text;
}

/// Copies `words` words per lane while all of these lie before %limit; then jumps to `otherwise`.
std::string copy_step(const char* label, unsigned words, const Word& word, const char* otherwise) {
    const unsigned row = kLanes * word.bytes;
    std::string loads;
    std::string stores;
    for (unsigned i = 0; i < words; ++i) {
        std::string names;
        for (unsigned k = i * word.registers; k < (i + 1) * word.registers; ++k) {
            names += names.empty() ? "%word" : ", %word";
            names += std::to_string(k);
        }
        if (word.registers > 1) names.insert(0, 1, '{').push_back('}');
        const Blanks blanks = {
            {"$type", word.type}, {"$names", names}, {"$offset", std::to_string(i * row)}};
        loads += filled("    ld.global.$type $names, [%source+$offset];\n", blanks);
        stores += filled("    st.global.$type [%dest+$offset], $names;\n", blanks);
    }
    return filled(kStep, {{"$label", label},
                          {"$otherwise", otherwise},
                          {"$span", std::to_string(((words - 1) * row) + word.bytes)},
                          {"$stride", std::to_string(words * row)},
                          {"$loads", loads},
                          {"$stores", stores}});
}

/// Copies words from %at, which is each lane's own, up to %limit; then jumps to `next`.
std::string copy_loop(const Word& word, const char* next) {
    return filled(copy_step("MANY$bytes", kUnrolled, word, "ONE$bytes") +
                      copy_step("ONE$bytes", 1, word, next),
                  {{"$bytes", std::to_string(word.bytes)}});
}

/// Copies all whole words if both addresses are aligned to them; else jumps to `otherwise`.
std::string aligned_copy(const Word& word, const char* otherwise) {
    return filled(kAligned, {{"$bytes", std::to_string(word.bytes)}, {"$otherwise", otherwise}}) +
           copy_loop(word, "REST");
}

constexpr const char* kEachRange = R"ptx(
.version 6.5
.target sm_50
.address_size 64

.visible .entry datastates_gather(
    .param .u64 ranges,
    .param .u32 count)
{
    .reg .pred %end, %beyond;
    .reg .b32 %block, %blocks, %blockdim, %inblock, %thread, %warp, %warps, %lane, %count;
    .reg .b32 %word<16>;
    .reg .b64 %ranges, %entry, %from, %to, %nbytes, %limit, %lane64, %at, %last, %source, %dest,
              %bits, %low;

    mov.u32 %block, %ctaid.x;
    mov.u32 %blocks, %nctaid.x;
    mov.u32 %blockdim, %ntid.x;
    mov.u32 %inblock, %tid.x;
    mad.lo.u32 %thread, %block, %blockdim, %inblock;
    shr.u32 %warp, %thread, 5;
    and.b32 %lane, %thread, 31;
    cvt.u64.u32 %lane64, %lane;
    mul.lo.u32 %warps, %blocks, %blockdim;
    shr.u32 %warps, %warps, 5;
    ld.param.u64 %ranges, [ranges];
    ld.param.u32 %count, [count];

RANGE:
    setp.ge.u32 %end, %warp, %count;
    @%end bra DONE;
    mul.wide.u32 %entry, %warp, 24;
    add.u64 %entry, %entry, %ranges;
    ld.global.u64 %from, [%entry];
    ld.global.u64 %to, [%entry+8];
    ld.global.u64 %nbytes, [%entry+16];
    add.u32 %warp, %warp, %warps;
    or.b64 %bits, %from, %to;
)ptx";

// Copies the rest of a range, behind %limit, byte by byte: all of it if no word size fits.
constexpr const char* kRest = R"ptx(
BY1:
    mov.u64 %limit, 0;
REST:
    add.u64 %at, %limit, %lane64;
    mov.u64 %limit, %nbytes;
)ptx";

constexpr const char* kDone = R"ptx(
DONE:
    ret;
}
)ptx";

}  // namespace

void add(std::vector<Range>& ranges, std::uint64_t to, std::uint64_t from, std::uint64_t nbytes) {
    for (std::uint64_t at = 0; at < nbytes; at += kRangeBytes) {
        ranges.push_back(
            {.from = from + at, .to = to + at, .nbytes = std::min(kRangeBytes, nbytes - at)});
    }
}

std::string kernel_ptx() {
    return kEachRange + aligned_copy(k16Bytes, "BY8") + aligned_copy(k8Bytes, "BY4") +
           aligned_copy(k4Bytes, "BY1") + kRest + copy_loop(kByte, "RANGE") + kDone;
}

}  // namespace datastates::gather
