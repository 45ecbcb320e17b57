#include "datastates/base/processor.hpp"

#if defined(__x86_64__)
#include <cpuid.h>

#include <cstdint>
#endif

namespace datastates {

Vectors vectors() noexcept {
#if defined(__x86_64__)
    std::uint32_t a = 0;
    std::uint32_t b = 0;
    std::uint32_t c = 0;
    std::uint32_t d = 0;
    if (__get_cpuid(1, &a, &b, &c, &d) == 0 || (c & bit_OSXSAVE) == 0) return {};
    std::uint32_t saved = 0;
    std::uint32_t upper = 0;
    __asm__("xgetbv" : "=a"(saved), "=d"(upper) : "c"(0));
    const bool wide = (saved & 0x6U) == 0x6U;     // 256 bits
    const bool wider = (saved & 0xE6U) == 0xE6U;  // 512 bits
    if (!wide || __get_cpuid_count(7, 0, &a, &b, &c, &d) == 0) return {};
    return {.avx2 = (b & bit_AVX2) != 0,
            .avx512f = wider && (b & bit_AVX512F) != 0,
            .avx512dq = wider && (b & bit_AVX512DQ) != 0,
            .vpclmulqdq = (c & bit_VPCLMULQDQ) != 0};
#else
    return {};
#endif
}

}  // namespace datastates
