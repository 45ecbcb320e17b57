#include "datastates/extent_read.hpp"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <span>
#include <sstream>
#include <string>

#include "datastates/checksum.hpp"
#include "datastates/error.hpp"
#include "datastates/io_backend.hpp"

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

/// Reads the spans of an extent one after the other, as far as it is asked to.
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

}  // namespace

void verify_extent(ReadState& job, const ReadPlan::Extent& extent, const std::byte* data,
                   unsigned worker) {
    const auto begin = Clock::now();
    std::uint64_t bytes = 0;
    for (const ReadPlan::Check& check : job.plan().checks(extent)) {
        verify(job, extent, check, data);
        bytes += check.length;
    }
    job.timeline().add(Stage::verify, worker, begin, bytes);
}

std::uint64_t read_through_cache(ReadState& job, const ReadPlan::Extent& extent, std::byte* data,
                                 std::uint32_t track, unsigned worker) {
    const auto begin = Clock::now();
    Clock::duration verifying{};
    std::uint64_t verified = 0;
    Cursor cursor(job, extent, data);
    for (const ReadPlan::Check& check : job.plan().checks(extent)) {
        cursor.advance(check.offset + check.length);
        const auto start = Clock::now();
        verify(job, extent, check, data);
        verifying += Clock::now() - start;
        verified += check.length;
    }
    cursor.advance(extent.length);
    // The two alternate many times; they are shown as if one had come after the other.
    const auto end = Clock::now();
    job.timeline().add({.stage = Stage::read,
                        .track = track,
                        .begin = begin,
                        .end = end - verifying,
                        .bytes = cursor.bytes()});
    job.timeline().add({.stage = Stage::verify,
                        .track = worker,
                        .begin = end - verifying,
                        .end = end,
                        .bytes = verified});
    return cursor.bytes();
}

void copy_to_host(ReadState& job, const ReadPlan::Extent& extent, const std::byte* data,
                  std::uint32_t track) {
    const auto begin = Clock::now();
    std::uint64_t bytes = 0;
    for (const ReadPlan::Piece& piece : job.plan().pieces(extent)) {
        const auto dest = static_cast<std::size_t>(piece.dest);
        if (piece.length == 0 || job.buffers().device[dest] >= 0) continue;
        std::memcpy(reinterpret_cast<void*>(job.buffers().address[dest] + piece.dest_offset),
                    data + piece.extent_offset, piece.length);
        bytes += piece.length;
    }
    if (bytes > 0) job.timeline().add(Stage::copy, track, begin, bytes);
}

}  // namespace datastates
