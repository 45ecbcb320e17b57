#include "datastates/read/extent_steps.hpp"

#include <random>

#include "check.hpp"

using namespace datastates;

namespace {

ReadPlan::Check covered(std::uint64_t offset, std::uint64_t length) {
    return {.offset = offset, .length = length, .crc = 0, .record = 0};
}

std::vector<std::uint64_t> lengths(std::uint64_t length, std::vector<ReadPlan::Check> checks,
                                   std::uint64_t longest) {
    std::vector<std::uint64_t> found;
    for (const auto& step : cut_into_steps(length, checks, longest)) found.push_back(step.length);
    return found;
}

using Lengths = std::vector<std::uint64_t>;

}  // namespace

TEST(steps_end_between_checks) {
    CHECK(lengths(10, {}, 4) == (Lengths{4, 4, 2}));
    CHECK(lengths(4, {}, 4) == Lengths{4});
    CHECK(lengths(0, {}, 4) == Lengths{0});
    CHECK(lengths(10, {covered(3, 3)}, 4) == (Lengths{3, 4, 3}));
    CHECK(lengths(10, {covered(0, 6)}, 4) == (Lengths{6, 4}));
    CHECK(lengths(10, {covered(0, 10)}, 4) == Lengths{10});
    CHECK(lengths(12, {covered(0, 4), covered(4, 4)}, 5) == (Lengths{4, 5, 3}));
    CHECK(lengths(12, {covered(0, 4), covered(2, 6)}, 5) == (Lengths{8, 4}));
}

TEST(random_checks_are_never_cut) {
    std::mt19937_64 random(1);
    for (int round = 0; round < 2000; ++round) {
        const std::uint64_t length = 1 + random() % 200;
        std::vector<ReadPlan::Check> checks;
        for (std::uint64_t at = random() % 20; at < length; at += random() % 30) {
            checks.push_back(covered(at, 1 + random() % (length - at)));
            if (random() % 2 == 0)
                checks.back().length = std::min<std::uint64_t>(checks.back().length, 9);
        }
        std::uint64_t at = 0;
        for (const auto& step : cut_into_steps(length, checks, 1 + random() % 50)) {
            CHECK_EQ(step.offset, at);
            CHECK(step.length > 0);
            at += step.length;
            for (const auto& check : checks) {
                CHECK(at <= check.offset || at >= check.offset + check.length);
            }
        }
        CHECK_EQ(at, length);
    }
}

CHECK_MAIN()
