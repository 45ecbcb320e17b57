#include "datastates/checksum/fingerprint.hpp"

#include <algorithm>
#include <cstring>
#include <random>
#include <set>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "support.hpp"

using namespace datastates;

namespace {

/// The whole fingerprint, by its definition.
std::uint64_t defined(const support::Bytes& data) {
    std::uint64_t sum = 0;
    for (std::size_t at = 0; at < data.size(); at += 8) {
        std::uint64_t x = 0;
        std::memcpy(&x, data.data() + at, std::min<std::size_t>(8, data.size() - at));
        x += (at / 8 + 1) * 0x9E3779B97F4A7C15U;
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
        x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
        sum += x ^ (x >> 31);
    }
    return sum;
}

std::uint64_t sampled(const std::vector<std::byte>& data) {
    return fingerprint::of_piece(fingerprint::Words::samples, data.size(), 0, data.data(),
                                 data.size());
}

}  // namespace

TEST(samples_of_pieces_add_up) {
    std::mt19937_64 random(1);
    for (int round = 0; round < 500; ++round) {
        const std::size_t size =
            fingerprint::kFew + 1 + (random() % (round % 2 == 0 ? 2000 : 100000));
        const auto data = support::random_bytes(random, size);
        std::uint64_t sum = 0;
        for (std::size_t at = 0; at < size;) {
            const std::size_t take = std::min<std::size_t>(8 * (1 + (random() % 300)), size - at);
            sum += fingerprint::of_piece(fingerprint::Words::samples, size, at, data.data() + at,
                                         take);
            at += take;
        }
        CHECK_EQ(sum, sampled(data));
    }
}

TEST(a_whole_fingerprint_is_over_all_words_and_its_pieces_add_up) {
    std::mt19937_64 random(5);
    for (int round = 0; round < 300; ++round) {
        const std::size_t size = random() % 5000;
        const auto data = support::random_bytes(random, size);
        CHECK_EQ(fingerprint::whole(0, data.data(), size), defined(data));
        std::uint64_t sum = 0;
        for (std::size_t at = 0; at < size;) {
            const std::size_t take = std::min<std::size_t>(8 * (1 + (random() % 300)), size - at);
            sum += fingerprint::of_piece(fingerprint::Words::all, size, at, data.data() + at, take);
            at += take;
        }
        CHECK_EQ(sum, defined(data));
    }
}

TEST(a_whole_fingerprint_sees_every_change_of_one_element) {
    std::mt19937_64 random(6);
    auto data = support::random_bytes(random, 4099);
    for (const bool zeros : {false, true}) {
        if (zeros) std::ranges::fill(data, std::byte{0});
        const auto before = fingerprint::whole(0, data.data(), data.size());
        for (std::size_t i = 0; i < data.size(); ++i) {
            for (int bit = 0; bit < 8; ++bit) {
                data[i] ^= std::byte{1} << bit;
                CHECK(fingerprint::whole(0, data.data(), data.size()) != before);
                data[i] ^= std::byte{1} << bit;
            }
        }
    }
}

TEST(words_that_change_alike_do_not_cancel_out) {
    for (std::size_t words = 1; words <= 64; ++words) {
        std::set<std::uint64_t> seen;
        for (std::uint64_t value = 0; value < 64; ++value) {
            const std::vector<std::uint64_t> same(words, value);
            seen.insert(fingerprint::whole(0, reinterpret_cast<const std::byte*>(same.data()),
                                           words * sizeof value));
        }
        CHECK_EQ(seen.size(), 64U);
    }
}

TEST(samples_32_words_of_large_ranges) {
    std::mt19937_64 random(3);
    const std::size_t size = 8192;
    auto data = support::random_bytes(random, size);
    const auto before = sampled(data);
    std::set<std::size_t> seen;
    for (std::size_t i = 0; i < size; ++i) {
        data[i] ^= std::byte{1};
        if (sampled(data) != before) seen.insert(i / 8);
        data[i] ^= std::byte{1};
    }
    CHECK_EQ(seen.size(), 32U);
    CHECK(seen.contains(0) && seen.contains((size / 8) - 1));
}

TEST(depends_on_the_position) {
    std::vector<std::byte> data(16);
    data[0] = std::byte{1};
    const auto first = fingerprint::whole(0, data.data(), 16);
    std::swap(data[0], data[8]);
    CHECK(fingerprint::whole(0, data.data(), 16) != first);
}

TEST(empty_is_zero_and_cut_words_are_refused) {
    const std::vector<std::byte> data(32);
    CHECK_EQ(fingerprint::whole(0, data.data(), 0), 0U);
    const auto of_piece = [&](std::uint64_t offset, std::uint64_t length) {
        return fingerprint::of_piece(fingerprint::Words::all, 32, offset, data.data(), length);
    };
    CHECK_THROWS(ErrorCode::invalid, of_piece(4, 8));
    CHECK_THROWS(ErrorCode::invalid, of_piece(8, 4));
    CHECK_THROWS(ErrorCode::invalid, of_piece(24, 16));
}

TEST(of_large_ranges_the_sampled_words_suffice) {
    std::mt19937_64 random(9);
    for (const std::size_t size : {4097, 4100, 4104, 5000, 8195, 100001}) {
        const auto data = support::random_bytes(random, size);
        support::Bytes samples;
        for (std::uint64_t i = 0; i < fingerprint::kSamples; ++i) {
            const auto offset = static_cast<std::ptrdiff_t>(fingerprint::sample_offset(size, i));
            const auto bytes =
                std::min<std::ptrdiff_t>(8, static_cast<std::ptrdiff_t>(size) - offset);
            samples.insert(samples.end(), data.begin() + offset, data.begin() + offset + bytes);
        }
        CHECK_EQ(fingerprint::of_samples(size, samples.data()), sampled(data));
    }
}

CHECK_MAIN()
