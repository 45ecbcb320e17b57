#include <chrono>

#include "check.hpp"
#include "datastates/memory/cuda.hpp"

using namespace datastates;
using namespace std::chrono_literals;

TEST(what_is_refused_while_a_graph_is_captured_is_asked_again) {
    const cuda::Patience patience;
    for (int i = 0; i < 20; ++i) {
        CHECK(patience.again(cuda::kCaptureUnsupported));
        CHECK(patience.again(cuda::kCaptureImplicit));
    }
    CHECK(!patience.again(cuda::kSuccess));
    CHECK(!patience.again(cuda::kNotReady));
}

TEST(a_capture_that_never_ends_is_not_waited_for_for_ever) {
    const cuda::Patience patience(20ms);
    const auto begin = std::chrono::steady_clock::now();
    while (patience.again(cuda::kCaptureImplicit)) {
    }
    CHECK(std::chrono::steady_clock::now() - begin >= 20ms);
    CHECK_EQ(to_string(cuda::capture_lasts().code()), "cuda");
}

CHECK_MAIN()
