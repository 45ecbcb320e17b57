#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace datastates {

/// CRC-32 as in ZIP and zlib, continued from `value` (0 at the start).
std::uint32_t crc32(std::uint32_t value, std::span<const std::byte> data);

/// CRC-32 whose register begins at 0 and is not inverted at the end. Unlike CRC-32 it is linear:
/// for a and b of equal length, raw(a xor b) = raw(a) xor raw(b).
std::uint32_t crc32_raw(std::span<const std::byte> data);

/// The effect of appending `length` bytes on a CRC. Make it once for a length that is used often.
/// Immutable.
class Crc32Shift {
  public:
    /// Takes three multiplications for any length.
    explicit Crc32Shift(std::uint64_t length);

    /// crc32_raw of some bytes followed by `length` zeros; `raw` is crc32_raw of the bytes. O(1).
    std::uint32_t shift(std::uint32_t raw) const;

    /// CRC-32 of A followed by B, from theirs. B has this object's length. O(1).
    std::uint32_t combine(std::uint32_t first, std::uint32_t second) const;

  private:
    std::uint32_t operator_;  // x^(8 * length)
};

/// CRC-32 of A followed by B, from the CRC-32 of each.
std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_length);

/// The checksum of some consecutive bytes.
struct CrcFragment {
    std::uint32_t crc;
    std::uint64_t length;
};

/// Cuts `data`, which begins at `position` of its source, where the source's chunks of
/// `chunk_bytes` begin. For each stretch it calls `first`, computes the checksum, and calls `tell`
/// with a fragment for `ChunkedCrc32::append`. `first` may fill in the stretch, which is then in
/// the processor's cache.
template <typename First, typename Tell>
void fragments(std::span<const std::byte> data, std::uint64_t position, std::uint64_t chunk_bytes,
               First&& first, Tell&& tell) {
    while (!data.empty()) {
        const auto length = static_cast<std::size_t>(
            std::min<std::uint64_t>(data.size(), chunk_bytes - (position % chunk_bytes)));
        const std::span<const std::byte> stretch = data.first(length);
        first(stretch);
        tell(CrcFragment{.crc = crc32(0, stretch), .length = length});
        position += length;
        data = data.subspan(length);
    }
}

/// The running checksums of one source: of the whole source and of each chunk of `chunk_bytes`.
/// Fragments are appended in order. The source's checksum is combined from its chunks' checksums.
/// Belongs to one thread at a time.
class ChunkedCrc32 {
  public:
    /// `chunks` must have room for ceil(source length / chunk_bytes) values.
    ChunkedCrc32(std::uint64_t chunk_bytes, std::span<std::uint32_t> chunks)
        : chunk_bytes_(chunk_bytes), chunks_(chunks) {}

    /// Appends a fragment that does not cross a chunk's end. `full_chunk` is the Crc32Shift of
    /// `chunk_bytes`.
    void append(const CrcFragment& fragment, const Crc32Shift& full_chunk);

    /// The checksum of all bytes so far.
    std::uint32_t value() const;

    std::uint64_t length() const { return (done_ * chunk_bytes_) + filled_; }

  private:
    void filled(std::uint64_t bytes, const Crc32Shift& full_chunk);

    std::uint64_t chunk_bytes_;
    std::span<std::uint32_t> chunks_;
    std::uint64_t done_ = 0;      // whole chunks
    std::uint64_t filled_ = 0;    // bytes of the current chunk
    std::uint32_t combined_ = 0;  // checksum of the whole chunks
};

}  // namespace datastates
