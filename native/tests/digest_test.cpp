#include "datastates/checksum/digest.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <random>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;

namespace {

using Digests = std::vector<std::atomic<std::uint32_t>>;

/// Folds `data` by one sweep after the other, of random length, each in updates of random length.
void sweep(std::mt19937_64& random, std::span<const DigestRuns> runs, const Bytes& data,
           Digests& digests) {
    for (std::size_t begin = 0; begin < data.size();) {
        const std::size_t end = begin + 1 + (random() % (data.size() - begin));
        DigestSweep sweep(runs, begin, digests);
        while (begin < end) {
            const std::size_t take = std::min<std::size_t>(1 + (random() % 900), end - begin);
            sweep.update(std::span(data).subspan(begin, take));
            begin += take;
        }
        sweep.finish();
    }
}

/// The CRC-32 of `nbytes` zeros. Contributions xor this constant are a CRC-32.
std::uint32_t constant(std::uint64_t nbytes) { return ~Crc32Shift(nbytes).shift(0xFFFFFFFFU); }

constexpr DigestRuns kGood{
    .offset = 8, .length = 40, .run_length = 8, .after = 400, .step = 100, .digest = 0};

}  // namespace

TEST(whole_tensors) {
    std::mt19937_64 random(1);
    for (int round = 0; round < 100; ++round) {
        const Bytes data = support::random_bytes(random, 1 + (random() % 5000));
        const DigestRuns all{.offset = 0,
                             .length = data.size(),
                             .run_length = data.size(),
                             .after = 0,
                             .step = data.size(),
                             .digest = 0};
        Digests digests(1);
        sweep(random, {&all, 1}, data, digests);
        CHECK_EQ(digests[0] ^ constant(data.size()), crc32(0, data));
    }
}

TEST(columns_of_a_matrix) {
    std::mt19937_64 random(2);
    for (int round = 0; round < 200; ++round) {
        const std::size_t rows = 1 + (random() % 40);
        const std::size_t width = 1 + (random() % 300);
        const Bytes matrix = support::random_bytes(random, rows * width);
        Digests digests(1);
        // Each part has some columns in a source of its own. All contribute to one digest.
        for (std::size_t first = 0; first < width;) {
            const std::size_t columns = 1 + (random() % (width - first));
            Bytes part;
            for (std::size_t row = 0; row < rows; ++row) {
                const auto at = matrix.begin() + static_cast<std::ptrdiff_t>((row * width) + first);
                part.insert(part.end(), at, at + static_cast<std::ptrdiff_t>(columns));
            }
            const DigestRuns runs{.offset = 0,
                                  .length = part.size(),
                                  .run_length = columns,
                                  .after = (rows * width) - first - columns,
                                  .step = width,
                                  .digest = 0};
            require_runs({&runs, 1}, part.size(), 1);
            sweep(random, {&runs, 1}, part, digests);
            first += columns;
        }
        CHECK_EQ(digests[0] ^ constant(matrix.size()), crc32(0, matrix));
    }
}

TEST(overlapping_stretches) {
    std::mt19937_64 random(3);
    for (int round = 0; round < 200; ++round) {
        const Bytes data = support::random_bytes(random, 1 + (random() % 3000));
        const std::size_t count = random() % 6;
        const support::RandomRuns made = support::RandomRuns::make(random, data.size(), count, 0);
        Digests digests(count);
        sweep(random, made.runs, data, digests);
        for (std::size_t i = 0; i < count; ++i) {
            CHECK_EQ(digests[i], support::digest_of(made.runs, i, data));
        }
    }
}

TEST(refuses_bad_runs) {
    require_runs({&kGood, 1}, 48, 1);
    const auto refuse = [](const std::function<void(DigestRuns&)>& spoil) {
        DigestRuns bad = kGood;
        spoil(bad);
        CHECK_THROWS(ErrorCode::invalid, require_runs({&bad, 1}, 48, 1));
    };
    refuse([](DigestRuns& r) { r.offset = 9; });
    refuse([](DigestRuns& r) { r.offset = ~std::uint64_t{0}; });
    refuse([](DigestRuns& r) { r.length = 48; });
    refuse([](DigestRuns& r) { r.length = 0; });
    refuse([](DigestRuns& r) { r.run_length = 0; });
    refuse([](DigestRuns& r) { r.run_length = 7; });
    refuse([](DigestRuns& r) { r.after = 399; });
    refuse([](DigestRuns& r) { r.after = ~std::uint64_t{0}; });
    refuse([](DigestRuns& r) { r.step = 7; });
    refuse([](DigestRuns& r) { r.step = ~std::uint64_t{0}; });
    refuse([](DigestRuns& r) { r.digest = 1; });
    std::array<DigestRuns, 2> two{kGood, kGood};
    two[1].offset = 0;
    CHECK_THROWS(ErrorCode::invalid, require_runs(two, 48, 1));
    const std::array<std::uint64_t, 1> one{8};
    const std::array<std::uint32_t, 1> digest{0};
    DigestRunsArrays arrays{.digests = 1,
                            .offset = one,
                            .length = one,
                            .run_length = one,
                            .after = one,
                            .step = one,
                            .digest = digest};
    CHECK_EQ(make_runs(arrays).size(), 1U);
    arrays.digests = 2;
    CHECK_THROWS(ErrorCode::invalid, make_runs(arrays));
    arrays.digests = 1;
    arrays.step = {};
    CHECK_THROWS(ErrorCode::invalid, make_runs(arrays));
}

CHECK_MAIN()
