#include "datastates/read/extent_read.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <iomanip>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "datastates/base/error.hpp"
#include "datastates/base/unmovable.hpp"
#include "datastates/checksum/checksum.hpp"
#include "datastates/io/io_backend.hpp"
#include "datastates/read/extent_steps.hpp"

namespace datastates {
namespace {

constexpr std::uint64_t kRead = std::uint64_t{256} << 10;
// Shorter stretches are read together with what lies between them, and copied.
constexpr std::uint64_t kStraight = std::uint64_t{64} << 10;

Error mismatch(const std::string& path, const ReadPlan::Extent& extent,
               const ReadPlan::Check& check, std::uint32_t found) {
    std::ostringstream message;
    message << "checksum mismatch in " << path << ", record " << check.record << ", bytes ["
            << extent.offset + check.offset << ", " << extent.offset + check.offset + check.length
            << "): stored " << std::hex << std::setfill('0') << std::setw(8) << check.crc
            << ", found " << std::setw(8) << found;
    return {ErrorCode::corrupt, 0, "verify", path, message.str(), check.record};
}

/// Asks once more for the bytes of a check, of a handed file: they may have changed on their way.
void ask_again(File& file, const ReadPlan::Extent& extent, const ReadPlan::Check& check,
               const StepMemory& data) {
    for (std::uint64_t done = 0; done < check.length;) {
        const std::uint64_t at = check.offset + done;
        const auto length = std::min<std::uint64_t>(check.length - done, file.traits().best_piece);
        const IoRequest request{.kind = IoKind::read,
                                .file = &file,
                                .buffer = data.at(at),
                                .length = length,
                                .required = length,
                                .offset = extent.offset + at,
                                .token = 0};
        const IoCompletion completion = file.transfer(request);
        if (!completion.ok()) throw io_error(completion, request);
        done += length;
    }
}

void verify(ReadState& job, const ReadPlan::Extent& extent, const ReadPlan::Check& check,
            const StepMemory& data) {
    const auto digest = [&] { return crc32(0, {data.at(check.offset), check.length}); };
    std::uint32_t found = digest();
    if (found != check.crc && job.file().descriptor() == nullptr) {
        ask_again(job.file(), extent, check, data);
        found = digest();
    }
    if (found != check.crc) throw mismatch(job.path(), extent, check, found);
}

/// Copies an extent's pieces to their destinations in host memory.
class Placing {
  public:
    Placing(const ReadState& job, const ReadPlan::Extent& extent)
        : job_(job), pieces_(job.plan().pieces(extent)) {}

    /// Copies what lies between the last end and a new one.
    void advance(std::uint64_t end, const StepMemory& data) {
        pieces_.advance(end, [&](const ReadPlan::Piece& part) {
            if (!job_.buffers().on_host(part.dest)) return;
            copy_part(part, data.at(part.extent_offset), destination(part, part.extent_offset));
            bytes_ += part.length * part.count;
        });
    }
    /// The destination of the bytes between the last end and a new one; null unless all of them go
    /// to one stretch of host memory.
    std::byte* straight(std::uint64_t end) const {
        const ReadPlan::Piece* const piece = pieces_.only(end);
        if (piece == nullptr || !job_.buffers().on_host(piece->dest)) return nullptr;
        return destination(*piece, pieces_.at());
    }
    /// Leaves out what lies before a new end.
    void skip(std::uint64_t end) {
        pieces_.advance(end, [](const ReadPlan::Piece&) {});
    }
    /// The last end.
    std::uint64_t at() const { return pieces_.at(); }
    std::uint64_t bytes() const { return bytes_; }

  private:
    std::byte* destination(const ReadPlan::Piece& piece, std::uint64_t from) const {
        std::byte* const memory = job_.buffers().host(static_cast<std::size_t>(piece.dest));
        return memory + piece.dest_offset + (from - piece.extent_offset);
    }

    const ReadState& job_;
    PieceSteps pieces_;
    std::uint64_t bytes_ = 0;
};

/// Reads the spans of an extent in order. Each advance() goes on from the last end to a new one.
class Cursor {
  public:
    Cursor(const ReadState& job, const ReadPlan::Extent& extent, DescriptorFile* file)
        : file_(file), extent_(extent), left_(job.plan().spans(extent)) {}

    void advance(std::uint64_t end, const StepMemory& data) {
        for (; !left_.empty() && left_.front().offset < end; left_ = left_.subspan(1)) {
            const ReadPlan::Span& span = left_.front();
            for (std::uint64_t i = first_behind(at_, span.offset, span.step); i < span.count; ++i) {
                const std::uint64_t begin = span.offset + (i * span.step);
                if (begin >= end) return;
                at_ = std::max(at_, begin);
                read_to(std::min(end, begin + span.length), data);
            }
            if (at_ < span.end()) return;
        }
    }
    /// Offset in the extent behind the last byte that was read.
    std::uint64_t at() const { return at_; }
    std::uint64_t bytes() const { return bytes_; }

  private:
    void read_to(std::uint64_t end, const StepMemory& data) {
        while (at_ < end) {
            const auto length = static_cast<std::size_t>(std::min(kRead, end - at_));
            const IoRequest request{.kind = IoKind::read,
                                    .file = file_,
                                    .buffer = data.at(at_),
                                    .length = length,
                                    .required = length,
                                    .offset = extent_.offset + at_,
                                    .token = 0,
                                    .through_cache = true};
            const IoCompletion completion = file_->transfer(request);
            if (!completion.ok()) throw io_error(completion, request);
            at_ += length;
            bytes_ += length;
        }
    }

    DescriptorFile* file_;
    const ReadPlan::Extent& extent_;
    std::span<const ReadPlan::Span> left_;
    std::uint64_t at_ = 0;
    std::uint64_t bytes_ = 0;
};

/// Says where the bytes of each step lie. If they need not stay, the steps take turns in two parts
/// of the memory: the bytes of one are copied to devices while those of the next are read.
class Window : Unmovable {
  public:
    Window(std::byte* memory, const std::vector<ReadPlan::Stretch>& steps, bool may_reuse)
        : memory_(memory) {
        const std::uint64_t bytes = window_bytes(steps);
        const std::uint64_t whole = steps.back().offset + steps.back().length;
        if (may_reuse && bytes < whole) part_ = bytes / kParts;
    }
    /// Waits for copies that were not handed over.
    ~Window() {
        for (const CopyEvents& events : events_) {
            for (const auto& event : events) static_cast<void>(event->synchronize());
        }
    }

    /// The memory for a step. Waits until nothing that was there before is still being copied.
    StepMemory open(std::size_t number, const ReadPlan::Stretch& step) {
        if (part_ == 0) return {.first = memory_, .offset = 0};
        CopyEvents& before = events_[number % kParts];
        static_cast<void>(ended(before, true));
        before.clear();
        return {.first = memory_ + ((number % kParts) * part_), .offset = step.offset};
    }
    /// Takes the events behind the copies of a step; with one part, of all steps.
    void close(std::size_t number, DeviceCopies& copies, bool last) {
        if (part_ != 0 || last) events_[number % kParts] = copies.record();
    }
    /// Hands over the events of all copies that may be running.
    CopyEvents take() {
        CopyEvents all = std::move(events_[0]);
        all.insert(all.end(), events_[1].begin(), events_[1].end());
        events_ = {};
        return all;
    }

  private:
    static constexpr std::size_t kParts = 2;
    std::byte* memory_;
    std::uint64_t part_ = 0;  // bytes; 0: each step has memory of its own
    std::array<CopyEvents, kParts> events_;
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

std::vector<ReadPlan::Stretch> read_steps(const ReadState& job, const ReadPlan::Extent& extent) {
    return cut_into_steps(extent.length, job.plan().checks(extent), longest_step(job));
}

Finished finish_extent(ReadState& job, const ReadPlan::Extent& extent, std::byte* data,
                       const Finishing& how) {
    const auto begin = Clock::now();
    Share verifying;
    Share placing;
    std::uint64_t verified = 0;
    std::uint64_t straight = 0;  // bytes read straight to their destinations, step by step
    const bool windowed = how.file != nullptr && !how.in_place;
    Cursor cursor(job, extent, how.file);
    Placing places(job, extent);
    DeviceCopies copies(job, extent);
    auto checks = job.plan().checks(extent);
    const auto steps = read_steps(job, extent);
    Window window(data, steps, windowed);
    for (std::size_t i = 0; i < steps.size(); ++i) {
        const std::uint64_t step_end = steps[i].offset + steps[i].length;
        const StepMemory memory = window.open(i, steps[i]);
        // Bytes up to `end`, verified by a check if there is one. Those from `keep` on wait for the
        // next check, which covers them, too.
        const auto finish_to = [&](std::uint64_t end, std::uint64_t keep,
                                   const ReadPlan::Check* check) {
            const std::uint64_t from = places.at();
            const bool may_be_straight =
                windowed && keep == end && end - from >= kStraight && cursor.at() <= from;
            std::byte* const dest = may_be_straight ? places.straight(end) : nullptr;
            const StepMemory at =
                dest != nullptr ? StepMemory{.first = dest, .offset = from} : memory;
            if (how.file != nullptr) cursor.advance(end, at);
            if (check != nullptr) {
                verifying.of([&] { verify(job, extent, *check, at); });
                verified += check->length;
            }
            if (dest != nullptr) {
                straight += end - from;
                places.skip(end);
            } else if (!how.in_place) {
                placing.of([&] { places.advance(keep, memory); });
            }
        };
        for (; !checks.empty() && checks.front().offset < step_end; checks = checks.subspan(1)) {
            const ReadPlan::Check& check = checks.front();
            const std::uint64_t end = check.offset + check.length;
            if (check.length >= kStraight) finish_to(check.offset, check.offset, nullptr);
            finish_to(end, checks.size() > 1 ? std::min(end, checks[1].offset) : end, &check);
        }
        finish_to(step_end, step_end, nullptr);
        if (!how.in_place) copies.advance(step_end, memory);
        window.close(i, copies, i + 1 == steps.size());
    }
    if (how.file != nullptr) job.file().descriptor()->let_go(extent.offset, extent.length);
    // Reading, verifying and copying alternate. The timeline shows them one after the other.
    const auto end = Clock::now();
    const auto placed = end - placing.time();
    const auto checked = placed - verifying.time();
    Timeline& timeline = job.timeline();
    const auto note = [&](Stage stage, std::uint32_t track, Clock::time_point from,
                          Clock::time_point to, std::uint64_t bytes) {
        timeline.add({.stage = stage, .track = track, .begin = from, .end = to, .bytes = bytes});
    };
    if (how.file != nullptr) note(Stage::read, how.track, begin, checked, cursor.bytes());
    note(Stage::verify, how.worker, checked, placed, verified);
    if (places.bytes() > 0) note(Stage::copy, how.track, placed, end, places.bytes());
    return {.bytes_read = cursor.bytes(),
            .in_place_bytes = straight,
            .events = window.take(),
            .copied = copies.bytes(),
            .copies_begin = copies.begin()};
}

}  // namespace datastates
