#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <vector>

#include "datastates/shim/cuda.hpp"

namespace datastates {

class HostCache;

/// A block of the cache; returns to its pool when destroyed.
class Block {
  public:
    Block(HostCache* cache, std::size_t index) : cache_(cache), index_(index) {}
    Block(Block&& other) noexcept;
    Block& operator=(Block&& other) noexcept;
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() { reset(); }

    std::span<std::byte> memory() const;
    void reset();

  private:
    HostCache* cache_;
    std::size_t index_;
};

/// The host memory that every byte passes through: one region, mapped and registered once, cut into
/// equal blocks. A caller that finds no free block waits for one: that is the backpressure.
/// Outlives its blocks. Thread-safe.
class HostCache {
  public:
    /// Takes as many whole blocks as fit `cache_bytes` (at least one must). Maps the region and
    /// touches none of it.
    HostCache(std::size_t cache_bytes, std::size_t block_bytes);
    ~HostCache();
    HostCache(const HostCache&) = delete;
    HostCache& operator=(const HostCache&) = delete;
    HostCache(HostCache&&) = delete;
    HostCache& operator=(HostCache&&) = delete;

    std::size_t block_bytes() const { return block_bytes_; }
    std::size_t bytes() const { return region_.size(); }
    std::span<std::byte> region() const { return region_; }

    /// Waits for a free block. Empty when `give_up` is true first; it is asked at the start and
    /// after every `poke` and release, with the pool locked, so it must be quick and not call back.
    std::optional<Block> acquire(const std::function<bool()>& give_up);
    std::optional<Block> try_acquire();
    /// Makes those who wait ask `give_up` again.
    void poke();

    /// Lets the kernel back the whole region with memory, in steps, until asked to stop. Where the
    /// kernel cannot (before 5.14), pages appear at their first use.
    void populate(const std::stop_token& stop) const;

    /// Page-locks the region, once, so that devices copy at full speed. Throws Error "cuda".
    void pin(std::shared_ptr<cuda::PrimaryContext> context);
    bool pinned() const { return pinned_.load(); }

  private:
    friend class Block;
    void release(std::size_t index);

    std::size_t block_bytes_;
    std::span<std::byte> region_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<std::size_t> free_;
    std::mutex pin_mutex_;  // page-locking takes seconds: the pool goes on meanwhile
    std::unique_ptr<cuda::PageLock> page_lock_;
    std::atomic<bool> pinned_ = false;
};

}  // namespace datastates
