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

/// Whatever the steps, each byte of each stretch is taken once, in order, as part of that stretch.
TEST(pieces_are_taken_stretch_by_stretch) {
    std::mt19937_64 random(2);
    for (int round = 0; round < 2000; ++round) {
        std::vector<ReadPlan::Piece> pieces;
        std::uint64_t length = 1;
        const std::uint64_t count = 1 + random() % 4;
        for (std::uint64_t at = random() % 20; pieces.size() < count; at += random() % 30) {
            const std::uint64_t each = 1 + random() % 9;
            pieces.push_back({.dest = static_cast<std::int32_t>(pieces.size()),
                              .dest_offset = random() % 5,
                              .extent_offset = at,
                              .length = each,
                              .count = 1 + random() % 6,
                              .extent_step = each + random() % 9,
                              .dest_step = each + random() % 3});
            length = std::max(length, pieces.back().extent_end());
        }
        std::vector<std::vector<std::uint64_t>> expected(pieces.size()), found(pieces.size());
        for (std::size_t p = 0; p < pieces.size(); ++p) {
            const ReadPlan::Piece& piece = pieces[p];
            for (std::uint64_t i = 0; i < piece.count; ++i) {
                for (std::uint64_t b = 0; b < piece.length; ++b) {
                    expected[p].push_back(piece.extent_offset + (i * piece.extent_step) + b);
                    expected[p].push_back(piece.dest_offset + (i * piece.dest_step) + b);
                }
            }
        }
        PieceSteps steps(pieces);
        for (std::uint64_t at = 0; at < length;) {
            at = std::min(length, at + 1 + random() % 25);
            steps.advance(at, [&](const ReadPlan::Piece& part) {
                auto& bytes = found[static_cast<std::size_t>(part.dest)];
                for (std::uint64_t i = 0; i < part.count; ++i) {
                    for (std::uint64_t b = 0; b < part.length; ++b) {
                        bytes.push_back(part.extent_offset + (i * part.extent_step) + b);
                        bytes.push_back(part.dest_offset + (i * part.dest_step) + b);
                    }
                }
            });
        }
        CHECK(found == expected);
    }
}

CHECK_MAIN()
