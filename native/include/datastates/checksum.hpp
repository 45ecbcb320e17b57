#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <vector>

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
/// `chunk_bytes` begin: what `ChunkedCrc32::append` takes. `beside` is shown each stretch in turn,
/// while it is in the processor's cache.
std::vector<CrcFragment> fragments(
    std::span<const std::byte> data, std::uint64_t position, std::uint64_t chunk_bytes,
    const std::function<void(std::span<const std::byte>)>& beside = [](auto) {});

/// One source's running checksums: its own and one for each `chunk_bytes` of it. Bytes come in
/// order. Every byte is read once: the source's checksum is combined out of its chunks'.
class ChunkedCrc32 {
  public:
    /// `chunks` must have room for ceil(source length / chunk_bytes) values.
    ChunkedCrc32(std::uint64_t chunk_bytes, std::span<std::uint32_t> chunks)
        : chunk_bytes_(chunk_bytes), chunks_(chunks) {}

    /// `full_chunk` is the operator for `chunk_bytes`.
    void update(std::span<const std::byte> data, const Crc32Shift& full_chunk);

    /// Goes on with bytes whose checksum is known. They must not reach beyond a chunk's end.
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
