#include "datastates/gather.hpp"

#include <algorithm>

namespace datastates::gather {

void add(std::vector<Range>& ranges, std::uint64_t to, std::uint64_t from, std::uint64_t nbytes) {
    for (std::uint64_t at = 0; at < nbytes; at += kRangeBytes) {
        ranges.push_back(
            {.from = from + at, .to = to + at, .nbytes = std::min(kRangeBytes, nbytes - at)});
    }
}

const char* const kKernelPtx = R"ptx(
.version 6.5
.target sm_50
.address_size 64

.visible .entry datastates_gather(
    .param .u64 ranges,
    .param .u32 count)
{
    .reg .pred %end, %fits, %beyond;
    .reg .b32 %block, %blocks, %blockdim, %inblock, %thread, %warp, %warps, %lane, %count;
    .reg .b32 %a<4>, %b<4>, %c<4>, %d<4>;
    .reg .b64 %ranges, %entry, %from, %to, %nbytes, %whole, %lane64, %at, %last, %source, %dest,
              %bits, %low, %word;

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
    and.b64 %low, %bits, 15;
    setp.eq.u64 %fits, %low, 0;
    @%fits bra BY16;
    and.b64 %low, %bits, 7;
    setp.eq.u64 %fits, %low, 0;
    @%fits bra BY8;
    and.b64 %low, %bits, 3;
    setp.eq.u64 %fits, %low, 0;
    @%fits bra BY4;
    mov.u64 %whole, 0;
    bra REST;

BY16:
    and.b64 %whole, %nbytes, 0xfffffffffffffff0;
    shl.b64 %at, %lane64, 4;
FOUR:
    add.u64 %last, %at, 1552;
    setp.gt.u64 %beyond, %last, %whole;
    @%beyond bra ONE;
    add.u64 %source, %from, %at;
    add.u64 %dest, %to, %at;
    ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%source];
    ld.global.v4.u32 {%b0, %b1, %b2, %b3}, [%source+512];
    ld.global.v4.u32 {%c0, %c1, %c2, %c3}, [%source+1024];
    ld.global.v4.u32 {%d0, %d1, %d2, %d3}, [%source+1536];
    st.global.v4.u32 [%dest], {%a0, %a1, %a2, %a3};
    st.global.v4.u32 [%dest+512], {%b0, %b1, %b2, %b3};
    st.global.v4.u32 [%dest+1024], {%c0, %c1, %c2, %c3};
    st.global.v4.u32 [%dest+1536], {%d0, %d1, %d2, %d3};
    add.u64 %at, %at, 2048;
    bra FOUR;
ONE:
    setp.ge.u64 %beyond, %at, %whole;
    @%beyond bra REST;
    add.u64 %source, %from, %at;
    add.u64 %dest, %to, %at;
    ld.global.v4.u32 {%a0, %a1, %a2, %a3}, [%source];
    st.global.v4.u32 [%dest], {%a0, %a1, %a2, %a3};
    add.u64 %at, %at, 512;
    bra ONE;

BY8:
    and.b64 %whole, %nbytes, 0xfffffffffffffff8;
    shl.b64 %at, %lane64, 3;
EIGHT:
    setp.ge.u64 %beyond, %at, %whole;
    @%beyond bra REST;
    add.u64 %source, %from, %at;
    add.u64 %dest, %to, %at;
    ld.global.u64 %word, [%source];
    st.global.u64 [%dest], %word;
    add.u64 %at, %at, 256;
    bra EIGHT;

BY4:
    and.b64 %whole, %nbytes, 0xfffffffffffffffc;
    shl.b64 %at, %lane64, 2;
FOURS:
    setp.ge.u64 %beyond, %at, %whole;
    @%beyond bra REST;
    add.u64 %source, %from, %at;
    add.u64 %dest, %to, %at;
    ld.global.u32 %a0, [%source];
    st.global.u32 [%dest], %a0;
    add.u64 %at, %at, 128;
    bra FOURS;

REST:
    add.u64 %at, %whole, %lane64;
BYTE:
    setp.ge.u64 %beyond, %at, %nbytes;
    @%beyond bra RANGE;
    add.u64 %source, %from, %at;
    add.u64 %dest, %to, %at;
    ld.global.u8 %a0, [%source];
    st.global.u8 [%dest], %a0;
    add.u64 %at, %at, 32;
    bra BYTE;

DONE:
    ret;
}
)ptx";

}  // namespace datastates::gather
