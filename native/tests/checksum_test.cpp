#include "datastates/checksum/checksum.hpp"

#include <random>

#include "check.hpp"
#include "support.hpp"

using namespace datastates;

TEST(known_value) {
    const std::string text = "123456789";
    CHECK_EQ(crc32(0, std::as_bytes(std::span(text))), 0xCBF43926U);
}

TEST(continues_and_takes_nothing) {
    std::mt19937_64 random(1);
    const auto data = support::random_bytes(random, 1000);
    const std::span<const std::byte> all(data);
    CHECK_EQ(crc32(crc32(0, all.first(300)), all.subspan(300)), crc32(0, all));
    CHECK_EQ(crc32(77, {}), 77U);
}

TEST(long_stretches_equal_their_parts) {
    std::mt19937_64 random(3);
    for (int round = 0; round < 400; ++round) {
        const auto data = support::random_bytes(random, 900 + random() % 3000);
        const auto all = std::span<const std::byte>(data).subspan(random() % 70);
        auto value = static_cast<std::uint32_t>(random());
        const std::uint32_t at_once = crc32(value, all);
        // So few bytes are never folded.
        for (std::size_t at = 0; at < all.size(); at += 100) {
            value = crc32(value, all.subspan(at, std::min<std::size_t>(100, all.size() - at)));
        }
        CHECK_EQ(at_once, value);
    }
}

TEST(combine_equals_direct) {
    std::mt19937_64 random(2);
    for (int round = 0; round < 300; ++round) {
        const auto data = support::random_bytes(random, random() % 5000);
        const std::span<const std::byte> all(data);
        const std::size_t cut = random() % (data.size() + 1);
        const auto first = crc32(0, all.first(cut));
        const auto second = crc32(0, all.subspan(cut));
        CHECK_EQ(crc32_combine(first, second, data.size() - cut), crc32(0, all));
        CHECK_EQ(Crc32Shift(data.size() - cut).combine(first, second), crc32(0, all));
    }
}

TEST(combine_takes_huge_lengths) {
    // Append 2^40 zeros in one step and in two.
    const auto zeros = [](std::uint64_t length) { return crc32_combine(0x12345678, 0, length); };
    CHECK_EQ(crc32_combine(zeros(std::uint64_t{1} << 39), 0, std::uint64_t{1} << 39),
             zeros(std::uint64_t{1} << 40));
}

TEST(raw_is_linear) {
    std::mt19937_64 random(5);
    for (int round = 0; round < 100; ++round) {
        const auto a = support::random_bytes(random, random() % 500);
        auto both = support::random_bytes(random, a.size());
        const auto b = crc32_raw(both);
        for (std::size_t i = 0; i < a.size(); ++i) both[i] ^= a[i];
        CHECK_EQ(crc32_raw(both), crc32_raw(a) ^ b);
    }
    CHECK_EQ(crc32_raw({}), 0U);
    // The definition, bit by bit.
    const auto data = support::random_bytes(random, 50);
    std::uint32_t value = 0;
    for (const std::byte byte : data) {
        value ^= std::to_integer<std::uint32_t>(byte);
        for (int bit = 0; bit < 8; ++bit) {
            value = (value >> 1) ^ ((value & 1U) != 0 ? 0xEDB88320U : 0);
        }
    }
    CHECK_EQ(crc32_raw(data), value);
}

TEST(shift_appends_zeros) {
    std::mt19937_64 random(6);
    for (int round = 0; round < 200; ++round) {
        auto data = support::random_bytes(random, random() % 100);
        const auto raw = crc32_raw(data);
        const std::size_t zeros = random() % 3000;
        data.resize(data.size() + zeros);
        CHECK_EQ(Crc32Shift(zeros).shift(raw), crc32_raw(data));
    }
    CHECK_EQ(Crc32Shift(0).shift(0x12345678), 0x12345678U);
}

TEST(shift_takes_huge_lengths) {
    std::mt19937_64 random(7);
    constexpr std::uint64_t kMost = std::uint64_t{1} << 62;
    for (int round = 0; round < 200; ++round) {
        const std::uint64_t length = round == 0 ? kMost : random() % kMost;
        const auto raw = static_cast<std::uint32_t>(random());
        const std::uint64_t first = random() % (length + 1);
        CHECK_EQ(Crc32Shift(length - first).shift(Crc32Shift(first).shift(raw)),
                 Crc32Shift(length).shift(raw));
        // For each bit k, shift twice by 2^(k-1) bytes.
        std::uint32_t expected = raw;
        for (unsigned k = 0; k < 63; ++k) {
            if (((length >> k) & 1U) == 0) continue;
            const std::uint64_t half = (std::uint64_t{1} << k) / 2;
            expected = k == 0 ? Crc32Shift(1).shift(expected)
                              : Crc32Shift(half).shift(Crc32Shift(half).shift(expected));
        }
        CHECK_EQ(Crc32Shift(length).shift(raw), expected);
    }
}

TEST(fragments_equal_direct) {
    std::mt19937_64 random(3);
    for (int round = 0; round < 400; ++round) {
        const auto data = support::random_bytes(random, random() % 3000);
        const std::span<const std::byte> all(data);
        const std::uint64_t chunk = 1 + (random() % 700);
        std::vector<std::uint32_t> chunks((data.size() + chunk - 1) / chunk);
        ChunkedCrc32 digest(chunk, chunks);
        const Crc32Shift shift(chunk);
        support::Bytes brought(data.size());
        for (std::size_t at = 0; at < data.size();) {
            const std::size_t take = std::min<std::size_t>(1 + (random() % 900), data.size() - at);
            const std::span<std::byte> part = std::span(brought).subspan(at, take);
            fragments(
                part, at, chunk,
                [&](std::span<const std::byte> stretch) {
                    const std::size_t begin =
                        at + static_cast<std::size_t>(stretch.data() - part.data());
                    std::ranges::copy(all.subspan(begin, stretch.size()),
                                      brought.begin() + static_cast<std::ptrdiff_t>(begin));
                },
                [&](const CrcFragment& fragment) { digest.append(fragment, shift); });
            at += take;
            CHECK_EQ(digest.length(), at);
            CHECK_EQ(digest.value(), crc32(0, all.first(at)));
        }
        CHECK(brought == data);
        for (std::size_t i = 0; i < chunks.size(); ++i) {
            const auto from = all.subspan(i * chunk);
            CHECK_EQ(chunks[i], crc32(0, from.first(std::min<std::size_t>(chunk, from.size()))));
        }
    }
    fragments({}, 5, 7, [](auto) { CHECK(false); }, [](const auto&) { CHECK(false); });
}

CHECK_MAIN()
