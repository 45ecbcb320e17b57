#include "datastates/memory/host_cache.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <numeric>
#include <ranges>
#include <string>
#include <utility>

#include "datastates/base/background.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/thread.hpp"

namespace datastates {
namespace {

constexpr std::size_t kBlockUnit = 4096;
// Large enough that the calls cost little beside the work. Small enough that the first piece is
// ready soon and that the destructor waits only for a few milliseconds.
constexpr std::size_t kPiece = std::size_t{16} << 20;
// Threads that populate memory. More of them would only wait for one another in the kernel, and
// take cores from the training.
constexpr unsigned kMaxWorkers = 4;
constexpr unsigned kCoresPerWorker = 4;
constexpr std::chrono::seconds kLongestHurry{2};

/// Backs fresh memory with pages, by a write to each. The training's mmap() and munmap() do not
/// wait for page faults, since Linux 6.4. They wait for each call of madvise(MADV_POPULATE_WRITE).
void touch(std::span<std::byte> memory, std::size_t page_bytes) {
    const auto write = [&](std::size_t at) {
        *static_cast<volatile std::byte*>(memory.data() + at) = std::byte{0};
    };
    for (std::size_t at = 0; at < memory.size(); at += page_bytes) write(at);
    write(memory.size() - 1);  // it may begin within a page, and so end on one more
}

/// Null where page-locking fails, most often because of the limit on locked memory.
std::unique_ptr<cuda::PageLock> try_page_lock(std::shared_ptr<cuda::PrimaryContext> context,
                                              std::span<std::byte> memory) {
    try {
        return std::make_unique<cuda::PageLock>(std::move(context), memory);
    } catch (const Error&) {
        return nullptr;
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

}  // namespace

Block::Block(Block&& other) noexcept
    : cache_(std::exchange(other.cache_, nullptr)), index_(other.index_) {}

Block& Block::operator=(Block&& other) noexcept {
    if (this != &other) {
        reset();
        cache_ = std::exchange(other.cache_, nullptr);
        index_ = other.index_;
    }
    return *this;
}

void Block::reset() {
    if (cache_ != nullptr) std::exchange(cache_, nullptr)->release(index_);
}

std::span<std::byte> Block::memory() const { return cache_->memory_of(index_); }

bool Block::page_locked() const {
    const std::scoped_lock lock(cache_->mutex_);
    return cache_->piece_of(index_).page_lock != nullptr;
}

HostCache::HostCache(std::size_t limit_bytes, std::size_t block_bytes, std::size_t page_bytes)
    : block_bytes_(block_bytes), page_bytes_(page_bytes) {
    if (block_bytes == 0 || block_bytes % kBlockUnit != 0) {
        throw Error::invalid("block_bytes must be a positive multiple of 4096, not " +
                             std::to_string(block_bytes));
    }
    const std::size_t blocks = limit_bytes / block_bytes;
    if (blocks == 0) {
        throw Error::invalid("a host cache of " + std::to_string(limit_bytes) +
                             " bytes holds no block of " + std::to_string(block_bytes));
    }
    // A piece is whole pages: a page of two pieces could be neither backed nor page-locked.
    const std::size_t step = std::lcm(block_bytes, page_bytes);
    blocks_per_piece_ = std::max<std::size_t>(1, kPiece / step) * (step / block_bytes);
    piece_bytes_ = blocks_per_piece_ * block_bytes;
    const std::size_t bytes = blocks * block_bytes;
    // Before the mapping, because nothing may throw once it exists and the destructor cannot run.
    pieces_.resize((bytes + piece_bytes_ - 1) / piece_bytes_);
    ready_.resize(blocks);
    taken_.resize(blocks);
    free_.resize(blocks);
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Error::io(errno, "mmap of host_cache", "");
    region_ = {static_cast<std::byte*>(memory), bytes};
    // Huge pages are only advice. A forked child (a data loader) must not make the pages
    // copy-on-write while a device writes to them.
    static_cast<void>(::madvise(memory, bytes, MADV_HUGEPAGE));
    static_cast<void>(::madvise(memory, bytes, MADV_DONTFORK));
    for (std::size_t i = 0; i < pieces_.size(); ++i) {
        const std::size_t at = i * piece_bytes_;
        pieces_[i].memory = region_.subspan(at, std::min(piece_bytes_, bytes - at));
    }
}

HostCache::~HostCache() {
    for (std::jthread& worker : workers_) worker.request_stop();
    workers_.clear();
    pieces_.clear();
    ::munmap(region_.data(), region_.size());
}

void HostCache::reserve(std::uint64_t bytes) { extend(reserved_, bytes); }

void HostCache::prepare(std::uint64_t bytes) { extend(prepared_, bytes); }

void HostCache::extend(std::size_t& pieces, std::uint64_t bytes) {
    const std::scoped_lock lock(mutex_);
    const std::size_t fitting = std::min<std::uint64_t>(bytes, region_.size());
    const std::size_t asked = (fitting + piece_bytes_ - 1) / piece_bytes_;
    if (asked <= pieces) return;
    if (workers_.empty()) start_workers();
    pieces = asked;
    work_.notify_all();
}

void HostCache::hurry(int more) {
    const std::scoped_lock lock(mutex_);
    if (hurries_ == 0) hurried_until_ = Clock::now() + kLongestHurry;
    hurries_ += more;
    work_.notify_all();
}

std::size_t HostCache::reserved() const {
    const std::scoped_lock lock(mutex_);
    return std::min(std::max(reserved_, prepared_) * piece_bytes_, region_.size());
}

std::span<std::byte> HostCache::populated() const {
    const std::scoped_lock lock(mutex_);
    const auto end = std::ranges::find_if(pieces_, [](const Piece& p) { return !p.populated; });
    const auto count = static_cast<std::size_t>(end - pieces_.begin());
    return region_.first(std::min(count * piece_bytes_, region_.size()));
}

void HostCache::pin(std::shared_ptr<cuda::PrimaryContext> context) {
    const std::scoped_lock lock(mutex_);
    if (context_) return;
    context_ = std::move(context);
    // Free blocks wait for their page lock, which comes soon. Blocks in use are locked while in
    // use.
    free_.assign(free_.size(), false);
    free_count_ = 0;
    ready_.assign(ready_.size(), false);
    work_.notify_all();
}

bool HostCache::pinned() const {
    const std::scoped_lock lock(mutex_);
    const auto count = static_cast<std::ptrdiff_t>(std::max(reserved_, prepared_));
    return count > 0 && std::all_of(pieces_.begin(), pieces_.begin() + count,
                                    [](const Piece& piece) { return piece.page_lock != nullptr; });
}

void HostCache::wait_settled() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return all_settled(); });
}

void HostCache::watch(const void* watcher, std::function<void()> usable) {
    const std::scoped_lock lock(mutex_);
    if (usable) {
        usable_[watcher] = std::move(usable);
    } else {
        usable_.erase(watcher);
    }
}

bool HostCache::all_settled() const {
    return std::ranges::none_of(
        pieces_, [&](const Piece& piece) { return piece.busy || needs_work(piece); });
}

void HostCache::start_workers() {
    const unsigned count =
        std::clamp(std::thread::hardware_concurrency() / kCoresPerWorker, 1U, kMaxWorkers);
    for (unsigned i = 0; i < count; ++i) {
        workers_.push_back(start_thread("ds-cache-" + std::to_string(i),
                                        [this](const std::stop_token& stop) { work(stop); }));
    }
}

bool HostCache::needs_work(const Piece& piece) const {
    const auto index = static_cast<std::size_t>(&piece - pieces_.data());
    return index < wanted() && (!piece.populated || (context_ && !piece.lock_tried));
}

HostCache::Piece* HostCache::next_piece() {
    const auto found = std::ranges::find_if(
        pieces_, [&](const Piece& piece) { return !piece.busy && needs_work(piece); });
    return found == pieces_.end() ? nullptr : &*found;
}

void HostCache::work(const std::stop_token& stop) {
    work_in_background();
    std::unique_lock lock(mutex_);
    for (;;) {
        Piece* piece = nullptr;
        const auto is_there = [&] { return (piece = next_piece()) != nullptr; };
        while (!is_there() && !stop.stop_requested()) {
            if (is_hurried()) {
                const auto until = hurried_until_;  // a copy, as the wait reads it unlocked
                work_.wait_until(lock, stop, until, is_there);
            } else {
                work_.wait(lock, stop, [&] { return is_there() || is_hurried(); });
            }
        }
        if (stop.stop_requested()) return;
        piece->busy = true;
        const auto context = context_;
        const bool fresh = !piece->populated;
        lock.unlock();
        if (fresh) populate(*piece);
        auto page_lock = context ? try_page_lock(context, piece->memory) : nullptr;
        lock.lock();
        piece->busy = false;
        piece->populated = true;
        if (context) {
            piece->lock_tried = true;
            piece->page_lock = std::move(page_lock);
            for (const std::size_t i : blocks_of(*piece)) make_ready(i);
        }
        tell_usable();
    }
}

/// Backs a piece with pages. Without a device each block is ready at once.
void HostCache::populate(const Piece& piece) {
    for (const std::size_t i : blocks_of(piece)) {
        touch(memory_of(i), page_bytes_);
        const std::scoped_lock lock(mutex_);
        if (context_) continue;
        make_ready(i);
        tell_usable();
    }
}

void HostCache::make_ready(std::size_t index) {
    ready_[index] = true;
    if (!taken_[index]) make_free(index);
}

void HostCache::tell_usable() {
    changed_.notify_all();
    for (const auto& [watcher, usable] : usable_) usable();
}

void HostCache::make_free(std::size_t index) {
    if (!free_[index]) ++free_count_;
    free_[index] = true;
}

Block HostCache::take_lowest() {
    const auto lowest = std::ranges::find(free_, true);
    const auto index = static_cast<std::size_t>(lowest - free_.begin());
    *lowest = false;
    --free_count_;
    taken_[index] = true;
    return {this, index};
}

std::optional<Block> HostCache::acquire(const std::function<bool()>& give_up) {
    std::unique_lock lock(mutex_);
    bool gave_up = false;
    changed_.wait(lock, [&] {
        gave_up = give_up();
        return gave_up || free_count_ > 0;
    });
    if (gave_up) return std::nullopt;
    return take_lowest();
}

std::optional<Block> HostCache::try_acquire() {
    const std::scoped_lock lock(mutex_);
    if (free_count_ == 0) return std::nullopt;
    return take_lowest();
}

void HostCache::poke() {
    // Under the lock, so that no waiter misses this between asking `give_up` and going to sleep.
    const std::scoped_lock lock(mutex_);
    changed_.notify_all();
}

void HostCache::release(std::size_t index) {
    const std::scoped_lock lock(mutex_);
    taken_[index] = false;
    if (ready_[index]) make_free(index);
    // Notify all: a single woken waiter might give up instead of taking the block.
    changed_.notify_all();
}

}  // namespace datastates
