#include "datastates/checksum/fingerprint.hpp"

namespace datastates::fingerprint {

const char* const kSamplesPtx = R"ptx(
.version 6.5
.target sm_50
.address_size 64

.visible .entry datastates_fingerprint(
    .param .u64 ranges,
    .param .u64 sums,
    .param .u32 count)
{
    .reg .pred %outside, %few, %more, %whole;
    .reg .b32 %block, %blockdim, %inblock, %thread, %range, %lane, %count, %bits, %low, %high, %otherlow,
              %otherhigh;
    .reg .b64 %ranges, %sums, %entry, %base, %nbytes, %words, %last, %samples, %i, %position, %at,
              %left, %address, %word, %byte, %shift64, %sum, %x, %y, %other, %aligned, %k, %range64;
    .reg .b32 %shift;

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
    shl.b64 %entry, %range64, 4;
    add.u64 %entry, %entry, %ranges;
    ld.global.u64 %base, [%entry];
    ld.global.u64 %nbytes, [%entry+8];
    add.u64 %words, %nbytes, 7;
    shr.u64 %words, %words, 3;
    sub.u64 %last, %words, 1;
    min.u64 %samples, %words, 32;
    setp.le.u64 %few, %words, 32;
    mov.u64 %sum, 0;
    cvt.u64.u32 %i, %lane;
    setp.ge.u64 %more, %i, %samples;
    @%more bra REDUCE;
    mov.u64 %position, %i;
    @%few bra LOAD;
    mul.lo.u64 %position, %i, %last;
    div.u64 %position, %position, 31;

LOAD:
    shl.b64 %at, %position, 3;
    sub.u64 %left, %nbytes, %at;
    min.u64 %left, %left, 8;
    add.u64 %address, %base, %at;
    and.b64 %aligned, %address, 7;
    xor.b64 %x, %left, 8;
    or.b64 %aligned, %aligned, %x;
    setp.eq.u64 %whole, %aligned, 0;
    @!%whole bra BYTES;
    ld.global.u64 %word, [%address];
    bra MIX;

BYTES:
    mov.u64 %word, 0;
    mov.u64 %k, 0;
BYTE:
    add.u64 %x, %address, %k;
    ld.global.u8 %byte, [%x];
    shl.b64 %shift64, %k, 3;
    cvt.u32.u64 %shift, %shift64;
    shl.b64 %byte, %byte, %shift;
    or.b64 %word, %word, %byte;
    add.u64 %k, %k, 1;
    setp.lt.u64 %more, %k, %left;
    @%more bra BYTE;

MIX:
    add.u64 %x, %position, 1;
    mul.lo.u64 %x, %x, 0x9E3779B97F4A7C15U;
    add.u64 %x, %x, %word;
    shr.u64 %y, %x, 30;
    xor.b64 %x, %x, %y;
    mul.lo.u64 %x, %x, 0xBF58476D1CE4E5B9U;
    shr.u64 %y, %x, 27;
    xor.b64 %x, %x, %y;
    mul.lo.u64 %x, %x, 0x94D049BB133111EBU;
    shr.u64 %y, %x, 31;
    xor.b64 %x, %x, %y;
    mov.u64 %sum, %x;

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

}  // namespace datastates::fingerprint
