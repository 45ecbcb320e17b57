#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <ranges>
#include <span>
#include <stop_token>
#include <thread>
#include <vector>

#include "datastates/base/page.hpp"
#include "datastates/base/timeline.hpp"
#include "datastates/base/unmovable.hpp"
#include "datastates/memory/cuda.hpp"

namespace datastates {

class HostCache;

/// A block of the cache, owned by whoever holds it. The destructor returns it to the cache. Belongs
/// to one thread at a time.
class Block {
  public:
    Block(HostCache* cache, std::size_t index) : cache_(cache), index_(index) {}
    Block(Block&& other) noexcept;
    Block& operator=(Block&& other) noexcept;
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;
    ~Block() { reset(); }

    std::span<std::byte> memory() const;
    /// Whether its memory is page-locked, so that devices reach it at full speed. A block may
    /// become page-locked while it is held, and stays so.
    bool page_locked() const;
    void reset();
    /// Keeps the block out of use for ever, because a device may still write into it.
    void lose() { cache_ = nullptr; }

  private:
    HostCache* cache_;
    std::size_t index_;
};

/// The host memory that captured and read bytes pass through. The constructor maps address space
/// for the whole limit and cuts it into equal blocks. A caller that finds no free block waits for
/// one; this is the backpressure.
///
/// Blocks are used from the lowest address on, and only as far as reserve() was told. Memory comes
/// in pieces of many blocks. Threads of the cache back each reserved piece with pages and, once a
/// device is in use, page-lock it. Without a device a block is usable once it has its pages. With a
/// device it is usable when the attempt to page-lock its piece is over. If that fails, the piece
/// still works, but slower.
///
/// The executor owns it; it must outlive its blocks. Thread-safe.
class HostCache : Unmovable {
  public:
    /// Maps as many whole blocks as fit into `limit_bytes`, without touching the memory. Throws
    /// Error "invalid" if not one fits or `block_bytes` is no multiple of 4096, Error "io" if mmap
    /// fails.
    HostCache(std::size_t limit_bytes, std::size_t block_bytes,
              std::size_t page_bytes = page_size());
    ~HostCache();

    std::size_t block_bytes() const { return block_bytes_; }
    /// The limit, in whole blocks.
    std::size_t bytes() const { return region_.size(); }
    std::size_t piece_bytes() const { return piece_bytes_; }

    /// Reserves `bytes` for use, in whole pieces and at most the limit. A smaller value than before
    /// changes nothing. Returns at once. Throws std::system_error if a thread cannot be started.
    void reserve(std::uint64_t bytes);
    /// Reserves `bytes` for later. This gives way to a Hurry: page-locking takes the driver from
    /// copies, about 60 ms a GiB. Returns at once, and throws as reserve() does.
    void prepare(std::uint64_t bytes);
    /// What is reserved, or would be without a Hurry.
    std::size_t reserved() const;
    /// While one exists, only what reserve() was told is populated and page-locked; for a few
    /// seconds, as what hurries may hang.
    class Hurry : Unmovable {
      public:
        explicit Hurry(HostCache& cache) : cache_(cache) { cache_.hurry(1); }
        ~Hurry() { cache_.hurry(-1); }

      private:
        HostCache& cache_;
    };
    /// The memory from the start up to the first piece without pages.
    std::span<std::byte> populated() const;

    /// Lets memory be page-locked from now on, for all devices; `context` may be that of any
    /// device.
    void pin(std::shared_ptr<cuda::PrimaryContext> context);
    /// Whether all reserved memory is page-locked.
    bool pinned() const;
    /// Blocks until nothing is left to populate or page-lock.
    void wait_settled() const;
    /// Calls `usable` whenever memory that was to come has become usable. It runs under the cache's
    /// lock, so it must be quick, must not throw and must not call the cache. Empty: this watcher
    /// gets no call, and none runs any more.
    void watch(const void* watcher, std::function<void()> usable);

    /// Waits for a free block. Empty when `give_up` returns true first. It is asked at the start
    /// and after every change, as poke() or a release. It runs under the cache's lock, so it must
    /// be quick and must not call the cache. REQUIRES: something is reserved.
    std::optional<Block> acquire(const std::function<bool()>& give_up);
    /// A free block, or empty if there is none now.
    std::optional<Block> try_acquire();
    /// Makes waiting callers of acquire() ask `give_up` again.
    void poke();

  private:
    friend class Block;
    struct Piece {
        std::span<std::byte> memory;
        bool busy = false;  // a worker is at it
        bool populated = false;
        bool lock_tried = false;
        std::unique_ptr<cuda::PageLock> page_lock;
    };

    void extend(std::size_t& pieces, std::uint64_t bytes);
    void hurry(int more);
    /// The pieces to populate and page-lock now.
    std::size_t wanted() const { return is_hurried() ? reserved_ : std::max(reserved_, prepared_); }
    bool is_hurried() const { return hurries_ > 0 && Clock::now() < hurried_until_; }
    void start_workers();
    void work(const std::stop_token& stop);
    bool needs_work(const Piece& piece) const;
    bool all_settled() const;
    Piece* next_piece();
    void populate(const Piece& piece);
    void make_ready(std::size_t index);
    void tell_usable();
    Piece& piece_of(std::size_t block) { return pieces_[block / blocks_per_piece_]; }
    auto blocks_of(const Piece& piece) const {
        const auto first = static_cast<std::size_t>(&piece - pieces_.data()) * blocks_per_piece_;
        return std::views::iota(first, std::min(first + blocks_per_piece_, taken_.size()));
    }
    std::span<std::byte> memory_of(std::size_t block) const {
        return region_.subspan(block * block_bytes_, block_bytes_);
    }
    void make_free(std::size_t index);
    Block take_lowest();
    void release(std::size_t index);

    const std::size_t block_bytes_;
    const std::size_t page_bytes_;
    std::size_t blocks_per_piece_;
    std::size_t piece_bytes_;
    std::span<std::byte> region_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::vector<Piece> pieces_;
    std::size_t reserved_ = 0;  // pieces
    std::size_t prepared_ = 0;  // pieces
    int hurries_ = 0;
    Clock::time_point hurried_until_;
    std::vector<bool> ready_;  // blocks that may be used
    std::vector<bool> taken_;
    // Blocks to take, as flags: giving one back must not allocate memory.
    std::vector<bool> free_;
    std::size_t free_count_ = 0;
    std::shared_ptr<cuda::PrimaryContext> context_;
    std::map<const void*, std::function<void()>> usable_;  // by watcher
    std::condition_variable_any work_;
    std::vector<std::jthread> workers_;  // last: join first
};

}  // namespace datastates
