#include "datastates/base/processor.hpp"

#include "check.hpp"

using namespace datastates;

TEST(vectors_are_those_that_the_compilers_library_finds) {
    const Vectors found = vectors();
#if defined(__x86_64__)
    __builtin_cpu_init();
    CHECK_EQ(found.avx2, __builtin_cpu_supports("avx2") != 0);
    CHECK_EQ(found.avx512f, __builtin_cpu_supports("avx512f") != 0);
    CHECK_EQ(found.avx512dq, __builtin_cpu_supports("avx512dq") != 0);
    CHECK_EQ(found.vpclmulqdq, __builtin_cpu_supports("vpclmulqdq") != 0);
#else
    CHECK(!found.avx2 && !found.avx512f && !found.avx512dq && !found.vpclmulqdq);
#endif
}

CHECK_MAIN()
