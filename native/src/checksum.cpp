#include "datastates/checksum.hpp"

#include <libdeflate.h>

#include <algorithm>
#include <array>

namespace datastates {
namespace {

// Polynomials over GF(2) modulo the CRC-32 polynomial, bit-reflected: bit 31 is x^0.
constexpr std::uint32_t kPolynomial = 0xEDB88320U;
constexpr std::uint32_t kOne = 0x80000000U;

constexpr std::uint32_t multiply(std::uint32_t a, std::uint32_t b) {
    std::uint32_t product = 0;
    for (std::uint32_t bit = kOne; bit != 0; bit >>= 1) {
        if ((a & bit) != 0) product ^= b;
        b = (b & 1U) != 0 ? (b >> 1) ^ kPolynomial : b >> 1;
    }
    return product;
}

// kPowers[k] = x^(8 * 2^k): what appending 2^k zero bytes multiplies by.
constexpr std::array<std::uint32_t, 64> make_powers() {
    std::array<std::uint32_t, 64> powers{};
    std::uint32_t power = kOne >> 8;
    for (auto& entry : powers) {
        entry = power;
        power = multiply(power, power);
    }
    return powers;
}
constexpr auto kPowers = make_powers();

}  // namespace

std::uint32_t crc32(std::uint32_t value, std::span<const std::byte> data) {
    // libdeflate answers a null buffer with the initial value, whatever the seed.
    if (data.empty()) return value;
    return libdeflate_crc32(value, data.data(), data.size());
}

Crc32Shift::Crc32Shift(std::uint64_t length) : operator_(kOne) {
    for (std::size_t k = 0; length != 0; ++k, length >>= 1) {
        if ((length & 1U) != 0) operator_ = multiply(operator_, kPowers.at(k));
    }
}

std::uint32_t Crc32Shift::combine(std::uint32_t first, std::uint32_t second) const {
    return multiply(operator_, first) ^ second;
}

std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second,
                            std::uint64_t second_length) {
    return Crc32Shift(second_length).combine(first, second);
}

std::vector<CrcFragment> fragments(std::span<const std::byte> data, std::uint64_t position,
                                   std::uint64_t chunk_bytes) {
    std::vector<CrcFragment> cut;
    cut.reserve((data.size() / chunk_bytes) + 2);
    while (!data.empty()) {
        const auto length = static_cast<std::size_t>(
            std::min<std::uint64_t>(data.size(), chunk_bytes - (position % chunk_bytes)));
        cut.push_back({.crc = crc32(0, data.first(length)), .length = length});
        position += length;
        data = data.subspan(length);
    }
    return cut;
}

void ChunkedCrc32::update(std::span<const std::byte> data, const Crc32Shift& full_chunk) {
    while (!data.empty()) {
        const auto take =
            static_cast<std::size_t>(std::min<std::uint64_t>(data.size(), chunk_bytes_ - filled_));
        std::uint32_t& chunk = chunks_[done_];
        chunk = crc32(filled_ == 0 ? 0 : chunk, data.first(take));
        filled(take, full_chunk);
        data = data.subspan(take);
    }
}

void ChunkedCrc32::append(const CrcFragment& fragment, const Crc32Shift& full_chunk) {
    if (fragment.length == 0) return;
    std::uint32_t& chunk = chunks_[done_];
    chunk = filled_ == 0 ? fragment.crc : crc32_combine(chunk, fragment.crc, fragment.length);
    filled(fragment.length, full_chunk);
}

void ChunkedCrc32::filled(std::uint64_t bytes, const Crc32Shift& full_chunk) {
    filled_ += bytes;
    if (filled_ < chunk_bytes_) return;
    combined_ = full_chunk.combine(combined_, chunks_[done_]);
    ++done_;
    filled_ = 0;
}

std::uint32_t ChunkedCrc32::value() const {
    if (filled_ == 0) return combined_;
    return crc32_combine(combined_, chunks_[done_], filled_);
}

}  // namespace datastates
