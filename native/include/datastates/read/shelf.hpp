#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>

#include "datastates/memory/host_cache.hpp"
#include "datastates/plan.hpp"

namespace datastates {

/// Extents, all bytes of them, that are read before it is known where they go, each in a block of
/// its own. One job of the reader's puts them here, a later one takes them. Thread-safe.
class Shelf {
  public:
    struct Kept {
        Block block;
        std::byte* data;  // the extent's first byte
    };

    void put(const ReadPlan::Extent& extent, Kept kept);
    /// What was read of exactly that part of the file.
    std::optional<Kept> take(const ReadPlan::Extent& extent);
    /// Gives back the blocks that nobody took.
    void clear();
    /// Nothing more is to be put here, but what is on its way.
    void close() { closed_.store(true, std::memory_order_release); }
    bool closed() const { return closed_.load(std::memory_order_acquire); }
    /// Notes what was read to put something here, or to no end.
    void count(std::uint64_t bytes_read);
    /// Of all that was noted.
    std::uint64_t bytes_read() const;
    /// Likewise, to be counted elsewhere from now on.
    std::uint64_t take_bytes_read();

  private:
    struct Entry {
        std::uint64_t length;
        Kept kept;
    };

    mutable std::mutex mutex_;
    std::map<std::uint64_t, Entry> entries_;  // by offset
    std::uint64_t bytes_read_ = 0;
    std::atomic<bool> closed_ = false;
};

}  // namespace datastates
