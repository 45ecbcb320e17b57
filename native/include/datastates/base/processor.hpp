#pragma once

namespace datastates {

/// Vectors that this processor has and its operating system saves; none on other processors than
/// x86-64.
struct Vectors {
    bool avx2 = false;
    bool avx512f = false;
    bool avx512dq = false;
    bool vpclmulqdq = false;
};

/// Asks the processor itself. __builtin_cpu_supports asks the compiler's library, and zig's, with
/// which wheels are built, denies everything.
Vectors vectors() noexcept;

}  // namespace datastates
