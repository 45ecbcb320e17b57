#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "datastates/base/timeline.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/plan.hpp"

namespace datastates {

/// Keeps whole extents that were read ahead, each in its own block. A read-ahead puts them here; a
/// later read job takes them. Both share ownership. Thread-safe.
class ExtentsAhead {
  public:
    struct Kept {
        Block block;
        std::byte* data;  // the extent's first byte
        Span read;        // for the timeline of the job that takes it
    };

    /// Keeps an extent, unless clear() was called.
    void put(const ReadPlan::Extent& extent, Kept kept);
    /// Removes and returns the extent of the same offset and length; empty if there is none.
    std::optional<Kept> take(const ReadPlan::Extent& extent);
    /// Gives back the blocks of all extents here, and of those that come later.
    void clear();
    /// Ends the read-ahead: only extents that are being read may still be put here.
    void close() { closed_.store(true, std::memory_order_release); }
    bool closed() const { return closed_.load(std::memory_order_acquire); }
    /// Adds to the bytes that the read-ahead has read, used or not.
    void count(std::uint64_t bytes_read);
    /// The sum of count().
    std::uint64_t bytes_read() const;
    /// Returns the sum and resets it to 0; the caller counts these bytes.
    std::uint64_t take_bytes_read();

  private:
    struct Entry {
        std::uint64_t length;
        Kept kept;
    };

    mutable std::mutex mutex_;
    std::map<std::uint64_t, Entry> entries_;  // by offset
    std::uint64_t bytes_read_ = 0;
    bool cleared_ = false;
    std::atomic<bool> closed_ = false;
};

}  // namespace datastates
