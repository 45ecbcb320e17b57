#include "datastates/checksum/checksum.hpp"

#include <libdeflate.h>

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

// The polynomial is primitive, so x^n depends only on n modulo this.
constexpr std::uint64_t kOrder = 0xFFFFFFFFU;

// kPowers[k][d] = x^(d * 256^k). x^n is the product of four entries, one for each byte of n.
constexpr std::array<std::array<std::uint32_t, 256>, 4> make_powers() {
    std::array<std::array<std::uint32_t, 256>, 4> powers{};
    std::uint32_t unit = kOne >> 1;
    for (auto& digit : powers) {
        std::uint32_t power = kOne;
        for (auto& entry : digit) {
            entry = power;
            power = multiply(power, unit);
        }
        unit = power;
    }
    return powers;
}
constexpr auto kPowers = make_powers();

}  // namespace

std::uint32_t crc32(std::uint32_t value, std::span<const std::byte> data) {
    // For a null buffer, libdeflate returns the initial value instead of `value`.
    if (data.empty()) return value;
    return libdeflate_crc32(value, data.data(), data.size());
}

std::uint32_t crc32_raw(std::span<const std::byte> data) {
    // crc32 inverts its argument and its result.
    return ~crc32(0xFFFFFFFFU, data);
}

Crc32Shift::Crc32Shift(std::uint64_t length) {
    const auto bits = static_cast<std::uint32_t>(length % kOrder * 8 % kOrder);
    const auto digit = [&](unsigned k) { return kPowers.at(k)[(bits >> (8 * k)) & 0xFFU]; };
    operator_ = multiply(multiply(digit(0), digit(1)), multiply(digit(2), digit(3)));
}

std::uint32_t Crc32Shift::shift(std::uint32_t raw) const { return multiply(operator_, raw); }

std::uint32_t Crc32Shift::combine(std::uint32_t first, std::uint32_t second) const {
    return shift(first) ^ second;
}

std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second,
                            std::uint64_t second_length) {
    return Crc32Shift(second_length).combine(first, second);
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
