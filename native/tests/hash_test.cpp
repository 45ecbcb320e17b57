#include "datastates/checksum/hash.hpp"

#include <algorithm>
#include <random>
#include <set>

#include "check.hpp"
#include "support.hpp"

using namespace datastates;
using hash::Hash;
using hash::of_chunk;
using support::Bytes;

namespace {

std::string hex(const Hash& hash) {
    std::string text;
    for (const std::byte byte : hash) {
        for (const int shift : {4, 0}) {
            text += "0123456789abcdef"[(std::to_integer<int>(byte) >> shift) & 15];
        }
    }
    return text;
}

Bytes counted(std::size_t nbytes) {
    Bytes data(nbytes);
    for (std::size_t i = 0; i < nbytes; ++i) data[i] = static_cast<std::byte>(i * 7 % 251);
    return data;
}

/// Lengths of a few rows, and around a whole chunk.
std::size_t some_length(std::mt19937_64& random) {
    if (random() % 4 == 0) return hash::kChunk - (random() % 1500);
    return random() % (random() % 2 == 0 ? 2100 : 40000);
}

}  // namespace

TEST(vectors_and_scalars_are_one_function) {
    std::mt19937_64 random(1);
    const Bytes data = support::random_bytes(random, hash::kChunk + 64);
    for (int round = 0; round < 400; ++round) {
        const std::span chunk(data.data() + (random() % 64), some_length(random));
        CHECK(of_chunk(chunk) == hash::of_chunk_by_scalars(chunk));
    }
}

// From docs/format.md, by tests/executor/test_hash.py, which is written for its words alone.
TEST(known_answers) {
    CHECK_EQ(hex(of_chunk({})), "3b6236fa418f3152247e61aa4dbefe90");
    CHECK_EQ(hex(of_chunk(counted(1))), "c52bf2c70a4c2c9a316c574f27768d07");
    CHECK_EQ(hex(of_chunk(counted(1000))), "42b92e923fc979864b71fe2fc2999c4a");
    CHECK_EQ(hex(of_chunk(counted(hash::kChunk))), "2a42a0e32889f9e6b0e6b2bfbb72fd22");
}

TEST(every_flipped_bit_changes_it) {
    std::mt19937_64 random(2);
    for (const bool zeros : {false, true}) {
        for (const std::size_t nbytes : {1, 16, 511, 512, 513, 1700}) {
            auto data = zeros ? Bytes(nbytes) : support::random_bytes(random, nbytes);
            std::set<Hash> seen = {of_chunk(data)};
            for (std::size_t bit = 0; bit < 8 * nbytes; ++bit) {
                data[bit / 8] ^= std::byte{1} << (bit % 8);
                CHECK(seen.insert(of_chunk(data)).second);
                data[bit / 8] ^= std::byte{1} << (bit % 8);
            }
        }
    }
    auto data = support::random_bytes(random, hash::kChunk);
    std::set<Hash> seen = {of_chunk(data)};
    for (int round = 0; round < 2000; ++round) {
        const std::size_t at = round == 0 ? data.size() - 1 : random() % data.size();
        data[at] ^= std::byte{1} << (random() % 8);
        CHECK(seen.insert(of_chunk(data)).second);
    }
}

TEST(what_is_swapped_changes_it) {
    std::mt19937_64 random(3);
    const Bytes data = support::random_bytes(random, 4096);
    std::set<Hash> seen = {of_chunk(data)};
    for (const std::size_t unit : {4, 8, 16, 512}) {  // words, pairs, columns and rows
        for (std::size_t first = 0; first < data.size(); first += unit) {
            const std::size_t other = (first + unit * (1 + (random() % 7))) % data.size();
            Bytes swapped = data;
            std::swap_ranges(swapped.begin() + static_cast<std::ptrdiff_t>(first),
                             swapped.begin() + static_cast<std::ptrdiff_t>(first + unit),
                             swapped.begin() + static_cast<std::ptrdiff_t>(other));
            CHECK(of_chunk(swapped) != *seen.find(of_chunk(data)));
        }
    }
    // A whole column with another one, which has the same keys.
    for (std::size_t column = 1; column < 32; ++column) {
        Bytes swapped = data;
        for (std::size_t row = 0; row < data.size(); row += 512) {
            const auto at = swapped.begin() + static_cast<std::ptrdiff_t>(row);
            std::swap_ranges(at, at + 16, at + static_cast<std::ptrdiff_t>(16 * column));
        }
        CHECK(seen.insert(of_chunk(swapped)).second);
    }
}

// Sums of squares, of equal words and of opposite ones: where sums could cancel out.
TEST(words_that_change_alike_do_not_cancel_out) {
    std::set<Hash> seen;
    for (std::uint32_t value = 0; value < 64; ++value) {
        for (const bool opposite : {false, true}) {
            if (opposite && value == 0) continue;
            std::vector<std::uint32_t> words(4096, value);
            for (std::size_t i = 1; i < words.size(); i += 2) {
                if (opposite) words[i] = -value;
            }
            CHECK(seen.insert(of_chunk(std::as_bytes(std::span(words)))).second);
        }
    }
}

TEST(zeros_at_the_end_count) {
    std::set<Hash> seen;
    for (const bool zeros : {false, true}) {
        Bytes data = zeros ? Bytes{} : counted(100);
        for (int more = 0; more < 1500; ++more) {
            CHECK(seen.insert(of_chunk(data)).second);
            data.push_back(std::byte{0});
        }
    }
}

TEST(a_range_is_its_chunks_end_to_end) {
    std::mt19937_64 random(4);
    const Bytes data = support::random_bytes(random, (2 * hash::kChunk) + 5);
    Bytes expected;
    for (std::size_t at = 0; at < data.size(); at += hash::kChunk) {
        const Hash one =
            of_chunk({data.data() + at, std::min<std::size_t>(hash::kChunk, data.size() - at)});
        expected.insert(expected.end(), one.begin(), one.end());
    }
    CHECK(hash::of_range(data) == expected);
    CHECK(hash::of_range({}).empty());
}

CHECK_MAIN()
