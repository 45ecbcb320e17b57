#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "datastates/checksum/checksum.hpp"
#include "datastates/checksum/digest.hpp"

namespace datastates {

/// The columns of a write plan, as the planner makes them. `source_*`, `extent_*`, `piece_*`,
/// `patch_*` and `runs*` have one entry per source, extent, piece, patch and stretch of runs;
/// `eager` has one per source. `extent_piece` is a CSR index: extent i has the pieces
/// extent_piece[i] to extent_piece[i + 1] - 1.
struct WritePlanArrays {
    std::span<const std::uint64_t> source_nbytes{};
    std::uint64_t chunk_bytes = 0;
    std::span<const std::byte> literal{};
    std::span<const std::uint64_t> extent_offset{};
    std::span<const std::uint64_t> extent_length{};
    std::span<const std::uint64_t> extent_piece{};
    std::span<const std::int32_t> piece_source{};
    std::span<const std::uint64_t> piece_source_offset{};
    std::span<const std::uint64_t> piece_extent_offset{};
    std::span<const std::uint64_t> piece_length{};
    std::span<const std::uint64_t> patch_extent{};
    std::span<const std::uint64_t> patch_offset{};
    std::span<const std::int32_t> patch_source{};
    std::span<const std::uint64_t> patch_after{};
    std::span<const std::uint8_t> eager{};
    std::span<const std::int32_t> runs_source{};
    DigestRunsArrays runs{};
};

/// What goes where in a container file. Sources are cut into pieces, and pieces tile extents. Each
/// extent passes through one cache block. Between extents may lie gaps, which are in the file
/// already: it must then exist. The constructor checks the plan and copies its arrays.
/// Immutable afterwards, so many snapshots share one plan.
class WritePlan {
  public:
    struct Piece {
        std::int32_t source;  // -1: bytes of `literal`, at `source_offset`
        std::uint64_t source_offset;
        std::uint64_t extent_offset;
        std::uint64_t length;
    };
    struct Patch {
        std::uint64_t offset;  // in its extent
        std::int32_t source;
        std::uint64_t after;  // bytes between the source and the end of what the checksum is of

        /// Adds the source's CRC-32, shifted by what comes after it, to the four bytes that are
        /// there, little-endian. So several sources and a constant make up one checksum.
        void apply(std::uint32_t crc, std::span<std::byte> extent) const;
    };
    struct Stretch {
        std::uint64_t offset;  // in the file
        std::uint64_t length;
    };
    struct Extent {
        std::uint64_t offset;  // in the file
        std::uint64_t length;
        std::size_t first_piece, end_piece;
        std::size_t first_patch, end_patch;
        bool has_sources;
        bool has_eager;
        bool has_lazy;
    };

    /// Throws Error "invalid" for arrays that disagree.
    explicit WritePlan(const WritePlanArrays& arrays);

    std::size_t sources() const { return source_nbytes_.size(); }
    std::uint64_t source_nbytes(std::size_t source) const { return source_nbytes_[source]; }
    /// Where the source's fingerprint begins: at its first byte on a multiple of 8 of the file, so
    /// that no extent cuts a word. A container's records all begin on one.
    std::uint64_t first_word(std::size_t source) const { return first_word_[source]; }
    bool eager(std::size_t source) const { return eager_[source] != 0; }
    std::uint64_t chunk_bytes() const { return chunk_bytes_; }
    const Crc32Shift& full_chunk() const { return full_chunk_; }
    /// Index of the source's first chunk checksum in the list over all sources;
    /// first_chunk(sources()) is the length of that list.
    std::size_t first_chunk(std::size_t source) const { return first_chunk_[source]; }

    std::span<const Extent> extents() const { return extents_; }
    std::span<const Piece> pieces(const Extent& extent) const;
    std::span<const Patch> patches(const Extent& extent) const;
    std::span<const std::byte> literal(const Piece& piece) const;

    /// How many digests the plan's runs contribute to. Each is over parts of one logical tensor.
    std::size_t digests() const { return digests_; }
    /// The source's runs, sorted by offset.
    std::span<const DigestRuns> digest_runs(std::size_t source) const;

    /// How many of the first extents hold the eager sources. The last of these may hold lazy
    /// sources too.
    std::size_t eager_extents() const { return eager_extents_; }
    /// How many extents hold bytes of sources, not only literal bytes.
    std::size_t source_extents() const { return source_extents_; }
    std::uint64_t max_extent_length() const { return max_extent_length_; }
    /// The end of the last extent.
    std::uint64_t file_length() const { return file_length_; }
    /// What is written: extents that follow on each other are one stretch.
    std::span<const Stretch> stretches() const { return stretches_; }
    bool has_gaps() const { return stretches_.size() > 1 || bytes_ < file_length_; }
    /// Bytes of all extents.
    std::uint64_t bytes() const { return bytes_; }

  private:
    void take_sources(const WritePlanArrays& arrays);
    void take_extents(const WritePlanArrays& arrays);
    void take_patches(const WritePlanArrays& arrays);
    void take_digests(const WritePlanArrays& arrays);
    Piece checked_piece(const WritePlanArrays& arrays, std::size_t index) const;

    std::vector<std::uint64_t> source_nbytes_;
    std::vector<std::uint8_t> eager_;
    std::vector<std::uint8_t> first_word_;
    std::vector<std::size_t> first_chunk_;
    std::uint64_t chunk_bytes_;
    Crc32Shift full_chunk_;
    std::vector<std::byte> literal_;
    std::vector<Extent> extents_;
    std::vector<Piece> pieces_;
    std::vector<Patch> patches_;
    std::size_t digests_ = 0;
    std::vector<DigestRuns> runs_;
    std::vector<std::size_t> first_runs_;  // by source; [sources()] is the number of all runs
    std::size_t eager_extents_ = 0;
    std::size_t source_extents_ = 0;
    std::uint64_t max_extent_length_ = 0;
    std::uint64_t file_length_ = 0;
    std::vector<Stretch> stretches_;
    std::uint64_t bytes_ = 0;
};

/// The columns of a read plan, as the planner makes them. `extent_span`, `extent_piece` and
/// `extent_check` are CSR indexes, as in WritePlanArrays.
struct ReadPlanArrays {
    std::span<const std::uint64_t> dest_nbytes{};
    std::span<const std::uint64_t> extent_offset{};
    std::span<const std::uint64_t> extent_length{};
    std::span<const std::uint8_t> extent_shared{};
    std::span<const std::uint64_t> extent_span{};
    std::span<const std::uint64_t> span_offset{};
    std::span<const std::uint64_t> span_length{};
    std::span<const std::uint64_t> span_count{};
    std::span<const std::uint64_t> span_step{};
    std::span<const std::uint64_t> extent_piece{};
    std::span<const std::int32_t> piece_dest{};
    std::span<const std::uint64_t> piece_dest_offset{};
    std::span<const std::uint64_t> piece_extent_offset{};
    std::span<const std::uint64_t> piece_length{};
    std::span<const std::uint64_t> piece_count{};
    std::span<const std::uint64_t> piece_extent_step{};
    std::span<const std::uint64_t> piece_dest_step{};
    std::span<const std::uint64_t> extent_check{};
    std::span<const std::uint64_t> check_offset{};
    std::span<const std::uint64_t> check_length{};
    std::span<const std::uint32_t> check_crc{};
    std::span<const std::int32_t> check_record{};
};

/// What to read from a container file, where to put it, and which checksums to expect. An extent is
/// read as its spans; what lies between their stretches is not read. The constructor checks the
/// plan and copies its arrays. Immutable afterwards.
class ReadPlan {
  public:
    /// Equal stretches, equally spaced. The offsets are those of the first.
    struct Piece {
        std::int32_t dest;
        std::uint64_t dest_offset;
        std::uint64_t extent_offset;
        std::uint64_t length;  // of each
        std::uint64_t count = 1;
        std::uint64_t extent_step = 0;
        std::uint64_t dest_step = 0;

        std::uint64_t extent_end() const {
            return extent_offset + ((count - 1) * extent_step) + length;
        }
    };
    /// Equal stretches, equally spaced, that are read.
    struct Span {
        std::uint64_t offset;  // of the first, in its extent
        std::uint64_t length;  // of each
        std::uint64_t count;
        std::uint64_t step;

        std::uint64_t end() const { return offset + ((count - 1) * step) + length; }
    };
    struct Check {
        std::uint64_t offset;  // in its extent
        std::uint64_t length;
        std::uint32_t crc;
        std::int32_t record;
    };
    struct Stretch {
        std::uint64_t offset;  // in its extent
        std::uint64_t length;
    };
    struct Extent {
        std::uint64_t offset;  // in the file
        std::uint64_t length;
        std::size_t first_span, end_span;
        std::size_t first_piece, end_piece;
        std::size_t first_check, end_check;
        std::uint64_t bytes;  // in its spans
        bool shared;          // other ranks of the host probably want the rest
        bool sparse() const { return bytes < length; }
        /// Whether it is read through the page cache: many small reads, or reads that ranks share.
        bool through_cache() const { return sparse() || shared; }
    };

    /// Throws Error "invalid" for arrays that disagree.
    explicit ReadPlan(const ReadPlanArrays& arrays);

    std::size_t dests() const { return dest_nbytes_.size(); }
    std::uint64_t dest_nbytes(std::size_t dest) const { return dest_nbytes_[dest]; }
    std::span<const Extent> extents() const { return extents_; }
    std::span<const Span> spans(const Extent& extent) const;
    std::span<const Piece> pieces(const Extent& extent) const;
    std::span<const Check> checks(const Extent& extent) const;
    std::uint64_t max_extent_length() const { return max_extent_length_; }
    /// Whether an extent is shared.
    bool shares() const { return shares_; }
    /// Bytes in all spans.
    std::uint64_t bytes() const { return bytes_; }

  private:
    void take_spans(const ReadPlanArrays& arrays, Extent& extent);
    Piece checked_piece(const ReadPlanArrays& arrays, const Extent& extent,
                        std::size_t index) const;
    bool is_read(const Extent& extent, const Piece& piece) const;

    std::vector<std::uint64_t> dest_nbytes_;
    std::vector<Extent> extents_;
    std::vector<Span> spans_;
    std::vector<Piece> pieces_;
    std::vector<Check> checks_;
    std::uint64_t max_extent_length_ = 0;
    bool shares_ = false;
    std::uint64_t bytes_ = 0;
};

/// The memory behind a plan's sources or destinations, for one snapshot or one restore.
struct Buffers {
    std::vector<std::uint64_t> address;
    std::vector<std::int32_t> device;   // CUDA ordinal, -1: host
    std::vector<std::uint64_t> stream;  // CUstream that produced it; 0: the legacy default stream
    std::vector<std::uint8_t> witness;  // 1: take fingerprints (writes only)

    /// Whether a source or destination is in device memory. -1, which is a plan's literal, is not.
    bool on_device(std::int32_t number) const {
        return number >= 0 && device[static_cast<std::size_t>(number)] >= 0;
    }
    /// Whether a destination is in host memory.
    bool on_host(std::int32_t number) const {
        return device[static_cast<std::size_t>(number)] == -1;
    }
    /// A buffer in host memory.
    std::byte* host(std::size_t number) const {
        return reinterpret_cast<std::byte*>(address[number]);
    }

    /// Throws Error "invalid" unless each column has one entry for each of `nbytes`, and each
    /// buffer that is not empty has a usable address. `witness` counts only where `with_witness` is
    /// set.
    void validate(std::span<const std::uint64_t> nbytes, bool with_witness) const;
};

}  // namespace datastates
