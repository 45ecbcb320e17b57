#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include "datastates/base/page.hpp"
#include "datastates/memory/cuda.hpp"

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
    /// Whether devices reach it at full speed. It may become so while it is held, never the other
    /// way.
    bool page_locked() const;
    void reset();
    /// Never gives it back: a device may write into it for ever.
    void lose() { cache_ = nullptr; }

  private:
    HostCache* cache_;
    std::size_t index_;
};

/// The host memory that every byte passes through: address space for the whole limit, mapped at
/// once, cut into equal blocks. A caller that finds no free block waits for one: that is the
/// backpressure.
///
/// Memory is used from the lowest address on, and only as far as `reserve` was told. It comes in
/// pieces of many blocks, which threads of our own back with memory and, once a device is in use,
/// page-lock. Without a device a reserved piece can be used at once, its memory comes beside; with
/// one it can be used when the attempt to page-lock it is over. Where that fails, the piece works
/// all the same, slower.
///
/// Outlives its blocks. Thread-safe.
class HostCache {
  public:
    /// Takes as many whole blocks as fit `limit_bytes` (at least one must). Touches no memory.
    HostCache(std::size_t limit_bytes, std::size_t block_bytes,
              std::size_t page_bytes = page_size());
    ~HostCache();
    HostCache(const HostCache&) = delete;
    HostCache& operator=(const HostCache&) = delete;
    HostCache(HostCache&&) = delete;
    HostCache& operator=(HostCache&&) = delete;

    std::size_t block_bytes() const { return block_bytes_; }
    /// The most there can be.
    std::size_t bytes() const { return region_.size(); }
    std::size_t piece_bytes() const { return piece_bytes_; }

    /// Says that so much will be in use soon: whole pieces, at most the limit, never less than what
    /// was said before. Returns at once.
    void reserve(std::uint64_t bytes);
    std::size_t reserved() const;
    /// The memory, from the start, that is known to be there; pieces follow one another in it.
    std::span<std::byte> populated() const;

    /// From now on memory is page-locked for devices; `context` may be that of any.
    void pin(std::shared_ptr<cuda::PrimaryContext> context);
    /// Whether all that is reserved is page-locked.
    bool pinned() const;
    /// Blocks until nothing is left to populate or page-lock.
    void wait_settled() const;

    /// Waits for a free block. Empty when `give_up` is true first; it is asked at the start and
    /// after every `poke` and release, with the pool locked, so it must be quick and not call back.
    /// REQUIRES: something is reserved.
    std::optional<Block> acquire(const std::function<bool()>& give_up);
    std::optional<Block> try_acquire();
    /// Makes those who wait ask `give_up` again.
    void poke();

  private:
    friend class Block;
    struct Piece {
        std::span<std::byte> memory;
        bool busy = false;  // with a worker
        bool populated = false;
        bool lock_tried = false;
        bool ready = false;  // its free blocks are in `free_`
        std::unique_ptr<cuda::PageLock> page_lock;
    };

    void start_workers();
    void work(const std::stop_token& stop);
    bool needs_work(const Piece& piece) const;
    Piece* next_piece();
    void make_ready(Piece& piece);
    Piece& piece_of(std::size_t block) { return pieces_[block / blocks_per_piece_]; }
    void make_free(std::size_t index);
    Block take_lowest();
    void release(std::size_t index);

    const std::size_t block_bytes_;
    std::size_t blocks_per_piece_;
    std::size_t piece_bytes_;
    std::span<std::byte> region_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::vector<Piece> pieces_;
    std::size_t reserved_ = 0;  // pieces
    std::vector<bool> taken_;
    // Blocks that can be had. To give one back takes no memory: there may be none.
    std::vector<bool> free_;
    std::size_t free_count_ = 0;
    std::shared_ptr<cuda::PrimaryContext> context_;
    std::condition_variable_any work_;
    std::vector<std::jthread> workers_;  // last: join first
};

}  // namespace datastates
