#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>

namespace datastates {

/// CRC-32 as in ZIP and zlib, continued from `value` (0 at the start).
std::uint32_t crc32(std::uint32_t value, std::span<const std::byte> data);

/// The register of a CRC-32 that begins at 0 and is not inverted at the end. Unlike CRC-32 itself
/// it is linear: that of the exclusive or of two stretches of one length is the exclusive or of
/// theirs.
std::uint32_t crc32_raw(std::span<const std::byte> data);

/// The operator that appends `length` bytes; make it once for a length that is used often.
class Crc32Shift {
  public:
    /// Three multiplications, whatever the length.
    explicit Crc32Shift(std::uint64_t length);

    /// `crc32_raw` of bytes whose own is `raw`, followed by this operator's length of zeros. O(1).
    std::uint32_t shift(std::uint32_t raw) const;

    /// CRC-32 of A followed by B, where B has this operator's length. O(1).
    std::uint32_t combine(std::uint32_t first, std::uint32_t second) const;

  private:
    std::uint32_t operator_;  // x^(8 * length)
};

/// CRC-32 of A followed by B out of theirs alone.
std::uint32_t crc32_combine(std::uint32_t first, std::uint32_t second, std::uint64_t second_length);

/// The checksum of some consecutive bytes.
struct CrcFragment {
    std::uint32_t crc;
    std::uint64_t length;
};

/// Checksums of `data`, which begins at `position` of its source, cut where the source's chunks of
/// `chunk_bytes` begin: `tell` gets what `ChunkedCrc32::append` takes. `first` is shown each
/// stretch before that, and may put it there: it is in the processor's cache then.
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

/// One source's running checksums: its own and one for each `chunk_bytes` of it. Fragments come in
/// order. The source's checksum is combined out of its chunks'.
class ChunkedCrc32 {
  public:
    /// `chunks` must have room for ceil(source length / chunk_bytes) values.
    ChunkedCrc32(std::uint64_t chunk_bytes, std::span<std::uint32_t> chunks)
        : chunk_bytes_(chunk_bytes), chunks_(chunks) {}

    /// Goes on with bytes that do not reach beyond a chunk's end. `full_chunk` is the operator for
    /// `chunk_bytes`.
    void append(const CrcFragment& fragment, const Crc32Shift& full_chunk);

    /// The checksum of everything so far.
    std::uint32_t value() const;

    std::uint64_t length() const { return (done_ * chunk_bytes_) + filled_; }

  private:
    void filled(std::uint64_t bytes, const Crc32Shift& full_chunk);

    std::uint64_t chunk_bytes_;
    std::span<std::uint32_t> chunks_;
    std::uint64_t done_ = 0;      // whole chunks
    std::uint64_t filled_ = 0;    // bytes of the chunk under way
    std::uint32_t combined_ = 0;  // of the whole chunks
};

}  // namespace datastates
