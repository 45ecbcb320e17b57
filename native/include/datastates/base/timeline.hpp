#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <vector>

namespace datastates {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
}

/// The stages that a job's time is split into.
enum class Stage : std::uint8_t {
    submit,      // the caller's time in submit_write
    create,      // creating the file and allocating its space
    capture,     // copying sources into the cache
    cache_wait,  // waiting for a free block
    checksum,    // checksums of device sources, by workers
    write,       // one extent, from its turn in the backend to its completion
    tail,        // writing what follows the last extent
    sync,        // fsync
    read,        // one extent, from its submission to its completion
    verify,      // checksums of what was read
    copy,        // from blocks to destinations
};
inline constexpr std::size_t kStages = 11;

std::string_view to_string(Stage stage);

struct Span {
    Stage stage;
    std::uint32_t track;  // spans of one stage and track do not overlap
    Clock::time_point begin;
    Clock::time_point end;
    std::uint64_t bytes;
};

/// The spans of one job. It keeps the first `limit` spans and only counts the others, as well as
/// spans for which there is no memory. Thread-safe.
class Timeline {
  public:
    /// A few megabytes; a terabyte in extents of 8 MiB has 10^5 writes.
    static constexpr std::size_t kLimit = 200'000;

    explicit Timeline(std::size_t limit = kLimit) : limit_(limit) {}

    void add(const Span& span) noexcept;
    /// Adds a span that ends now.
    void add(Stage stage, std::uint32_t track, Clock::time_point begin,
             std::uint64_t bytes) noexcept {
        add({.stage = stage, .track = track, .begin = begin, .end = Clock::now(), .bytes = bytes});
    }

    /// The spans in the order in which they were added.
    std::vector<Span> spans() const;
    std::uint64_t dropped() const;

  private:
    const std::size_t limit_;
    mutable std::mutex mutex_;
    std::vector<Span> spans_;
    std::uint64_t dropped_ = 0;
};

/// Hands out track numbers, the lowest free one first. Belongs to one thread.
class Tracks {
  public:
    std::uint32_t take();
    void give_back(std::uint32_t track) { taken_[track] = false; }

  private:
    std::vector<bool> taken_;
};

}  // namespace datastates
