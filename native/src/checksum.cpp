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

void ChunkedCrc32::update(std::span<const std::byte> data, const Crc32Shift& full_chunk) {
    while (!data.empty()) {
        const auto take =
            static_cast<std::size_t>(std::min<std::uint64_t>(data.size(), chunk_bytes_ - filled_));
        std::uint32_t& chunk = chunks_[done_];
        chunk = crc32(filled_ == 0 ? 0 : chunk, data.first(take));
        filled_ += take;
        data = data.subspan(take);
        if (filled_ == chunk_bytes_) {
            combined_ = full_chunk.combine(combined_, chunk);
            ++done_;
            filled_ = 0;
        }
    }
}

std::uint32_t ChunkedCrc32::value() const {
    if (filled_ == 0) return combined_;
    return crc32_combine(combined_, chunks_[done_], filled_);
}

}  // namespace datastates
