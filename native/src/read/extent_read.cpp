#include "datastates/read/extent_read.hpp"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <span>
#include <sstream>
#include <string>

#include "datastates/base/error.hpp"
#include "datastates/checksum/checksum.hpp"
#include "datastates/io/io_backend.hpp"

namespace datastates {
namespace {

constexpr std::uint64_t kStep = std::uint64_t{256} << 10;

Error mismatch(const std::string& path, const ReadPlan::Extent& extent,
               const ReadPlan::Check& check, std::uint32_t found) {
    std::ostringstream message;
    message << "checksum mismatch in " << path << ", record " << check.record << ", bytes ["
            << extent.offset + check.offset << ", " << extent.offset + check.offset + check.length
            << "): stored " << std::hex << std::setfill('0') << std::setw(8) << check.crc
            << ", found " << std::setw(8) << found;
    return {ErrorCode::corrupt, 0, "verify", path, message.str(), check.record};
}

void verify(const ReadState& job, const ReadPlan::Extent& extent, const ReadPlan::Check& check,
            const std::byte* data) {
    const std::uint32_t found = crc32(0, {data + check.offset, check.length});
    if (found != check.crc) throw mismatch(job.path(), extent, check, found);
}

/// Copies an extent's pieces to their destinations in host memory. Each advance() goes on from the
/// last end to a new one.
class Placing {
  public:
    Placing(const ReadState& job, const ReadPlan::Extent& extent, const std::byte* data)
        : job_(job), data_(data), left_(job.plan().pieces(extent)) {}

    void advance(std::uint64_t end) {
        for (const ReadPlan::Piece& piece : left_) {
            if (piece.extent_offset >= end) break;
            place(piece, end);
        }
        while (!left_.empty() && end_of(left_.front()) <= end) left_ = left_.subspan(1);
        at_ = end;
    }
    std::uint64_t bytes() const { return bytes_; }

  private:
    static std::uint64_t end_of(const ReadPlan::Piece& piece) {
        return piece.extent_offset + piece.length;
    }
    void place(const ReadPlan::Piece& piece, std::uint64_t end) {
        const auto dest = static_cast<std::size_t>(piece.dest);
        const std::uint64_t from = std::max(at_, piece.extent_offset);
        const std::uint64_t to = std::min(end, end_of(piece));
        if (from >= to || job_.buffers().device[dest] >= 0) return;
        const std::uint64_t address =
            job_.buffers().address[dest] + piece.dest_offset + (from - piece.extent_offset);
        std::memcpy(reinterpret_cast<void*>(address), data_ + from, to - from);
        bytes_ += to - from;
    }

    const ReadState& job_;
    const std::byte* data_;
    std::span<const ReadPlan::Piece> left_;
    std::uint64_t at_ = 0;  // in the extent
    std::uint64_t bytes_ = 0;
};

/// Reads the spans of an extent in order. Each advance() goes on from the last end to a new one.
class Cursor {
  public:
    Cursor(ReadState& job, const ReadPlan::Extent& extent, std::byte* data)
        : job_(job), extent_(extent), data_(data), left_(job.plan().spans(extent)) {}

    void advance(std::uint64_t end) {
        for (; !left_.empty() && left_.front().offset < end; left_ = left_.subspan(1)) {
            const ReadPlan::Stretch& span = left_.front();
            at_ = std::max(at_, span.offset);
            read_to(std::min(end, span.offset + span.length));
            if (at_ < span.offset + span.length) return;
        }
    }
    std::uint64_t bytes() const { return bytes_; }

  private:
    void read_to(std::uint64_t end) {
        while (at_ < end) {
            const auto length = static_cast<std::size_t>(std::min(kStep, end - at_));
            const IoRequest request{.kind = IoKind::read,
                                    .file = &job_.file(),
                                    .buffer = data_ + at_,
                                    .length = length,
                                    .required = length,
                                    .offset = extent_.offset + at_,
                                    .token = 0,
                                    .through_cache = true};
            const IoCompletion completion = transfer(request);
            if (!completion.ok()) throw io_error(completion, request);
            at_ += length;
            bytes_ += length;
        }
    }

    ReadState& job_;
    const ReadPlan::Extent& extent_;
    std::byte* data_;
    std::span<const ReadPlan::Stretch> left_;
    std::uint64_t at_ = 0;  // in the extent
    std::uint64_t bytes_ = 0;
};

/// Adds up the time of a step that runs many times.
class Share {
  public:
    template <typename Part>
    void of(Part&& part) {
        const auto begin = Clock::now();
        part();
        time_ += Clock::now() - begin;
    }
    Clock::duration time() const { return time_; }

  private:
    Clock::duration time_{};
};

}  // namespace

std::uint64_t finish_extent(ReadState& job, const ReadPlan::Extent& extent, std::byte* data,
                            const Finishing& how) {
    const auto begin = Clock::now();
    Share verifying;
    Share placing;
    std::uint64_t verified = 0;
    Cursor cursor(job, extent, data);
    Placing places(job, extent, data);
    const auto read_to = [&](std::uint64_t end) {
        if (how.through_cache) cursor.advance(end);
    };
    const auto place_to = [&](std::uint64_t end) {
        if (!how.in_place) placing.of([&] { places.advance(end); });
    };
    const auto checks = job.plan().checks(extent);
    for (std::size_t i = 0; i < checks.size(); ++i) {
        const std::uint64_t end = checks[i].offset + checks[i].length;
        read_to(end);
        verifying.of([&] { verify(job, extent, checks[i], data); });
        verified += checks[i].length;
        // Bytes that the next check covers too wait for it.
        place_to(i + 1 < checks.size() ? std::min(end, checks[i + 1].offset) : end);
    }
    read_to(extent.length);
    place_to(extent.length);
    if (how.through_cache) job.file().let_go(extent.offset, extent.length);
    // Reading, verifying and copying alternate. The timeline shows them one after the other.
    const auto end = Clock::now();
    const auto placed = end - placing.time();
    const auto checked = placed - verifying.time();
    Timeline& timeline = job.timeline();
    const auto note = [&](Stage stage, std::uint32_t track, Clock::time_point from,
                          Clock::time_point to, std::uint64_t bytes) {
        timeline.add({.stage = stage, .track = track, .begin = from, .end = to, .bytes = bytes});
    };
    if (how.through_cache) note(Stage::read, how.track, begin, checked, cursor.bytes());
    note(Stage::verify, how.worker, checked, placed, verified);
    if (places.bytes() > 0) note(Stage::copy, how.track, placed, end, places.bytes());
    return cursor.bytes();
}

}  // namespace datastates
