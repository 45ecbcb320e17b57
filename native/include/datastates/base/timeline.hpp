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

/// What a job's time goes to.
enum class Stage : std::uint8_t {
    submit,      // the caller inside submit_write
    create,      // making the file, and room for it
    capture,     // copying sources into the cache
    cache_wait,  // for a free block
    checksum,    // of device sources, by the workers
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

/// What happened when during one job. Bounded: a job of more spans keeps the first ones and counts
/// the others, and those for which there is no memory. Thread-safe.
class Timeline {
  public:
    /// A few megabytes; a terabyte in extents of 8 MiB has 10^5 writes.
    static constexpr std::size_t kLimit = 200'000;

    explicit Timeline(std::size_t limit = kLimit) : limit_(limit) {}

    void add(const Span& span) noexcept;
    /// One that ends now.
    void add(Stage stage, std::uint32_t track, Clock::time_point begin,
             std::uint64_t bytes) noexcept {
        add({.stage = stage, .track = track, .begin = begin, .end = Clock::now(), .bytes = bytes});
    }

    /// In the order in which they were added.
    std::vector<Span> spans() const;
    std::uint64_t dropped() const;

  private:
    const std::size_t limit_;
    mutable std::mutex mutex_;
    std::vector<Span> spans_;
    std::uint64_t dropped_ = 0;
};

/// Hands out track numbers, the lowest free one first. One thread's.
class Tracks {
  public:
    std::uint32_t take();
    void give_back(std::uint32_t track) { taken_[track] = false; }

  private:
    std::vector<bool> taken_;
};

}  // namespace datastates
