#include "datastates/host_cache.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "datastates/error.hpp"

namespace datastates {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kPopulateStep = std::size_t{64} << 20;

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

std::span<std::byte> Block::memory() const {
    return cache_->region_.subspan(index_ * cache_->block_bytes_, cache_->block_bytes_);
}

HostCache::HostCache(std::size_t cache_bytes, std::size_t block_bytes) : block_bytes_(block_bytes) {
    if (block_bytes == 0 || block_bytes % kPage != 0) {
        throw Error::invalid("block_bytes must be a positive multiple of 4096, not " +
                             std::to_string(block_bytes));
    }
    const std::size_t blocks = cache_bytes / block_bytes;
    if (blocks == 0) {
        throw Error::invalid("a host cache of " + std::to_string(cache_bytes) +
                             " bytes holds no block of " + std::to_string(block_bytes));
    }
    const std::size_t bytes = blocks * block_bytes;
    // Before the mapping, so that nothing can throw between it and the destructor's duty.
    free_.reserve(blocks);
    void* memory =
        ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw Error::io(errno, "mmap", "");
    region_ = {static_cast<std::byte*>(memory), bytes};
    // Advice: refused by kernels built without it, and then all still works. A forked child (a data
    // loader) must not make our pages copy-on-write while a device writes to them.
    static_cast<void>(::madvise(memory, bytes, MADV_HUGEPAGE));
    static_cast<void>(::madvise(memory, bytes, MADV_DONTFORK));
    for (std::size_t i = blocks; i > 0; --i) free_.push_back(i - 1);
}

HostCache::~HostCache() {
    page_lock_.reset();
    ::munmap(region_.data(), region_.size());
}

std::optional<Block> HostCache::acquire(const std::function<bool()>& give_up) {
    std::unique_lock lock(mutex_);
    bool gave_up = false;
    changed_.wait(lock, [&] {
        gave_up = give_up();
        return gave_up || !free_.empty();
    });
    if (gave_up) return std::nullopt;
    const std::size_t index = free_.back();
    free_.pop_back();
    return Block(this, index);
}

std::optional<Block> HostCache::try_acquire() {
    const std::scoped_lock lock(mutex_);
    if (free_.empty()) return std::nullopt;
    const std::size_t index = free_.back();
    free_.pop_back();
    return Block(this, index);
}

void HostCache::poke() {
    // Locked, so that a waiter is either before its question or asleep, never between.
    const std::scoped_lock lock(mutex_);
    changed_.notify_all();
}

void HostCache::release(std::size_t index) {
    const std::scoped_lock lock(mutex_);
    free_.push_back(index);
    // All: the one woken might give up instead of taking the block.
    changed_.notify_all();
}

void HostCache::populate(const std::stop_token& stop) const {
#ifdef MADV_POPULATE_WRITE
    for (std::size_t at = 0; at < region_.size() && !stop.stop_requested(); at += kPopulateStep) {
        const std::size_t length = std::min(kPopulateStep, region_.size() - at);
        if (::madvise(region_.data() + at, length, MADV_POPULATE_WRITE) != 0) return;
    }
#endif
}

void HostCache::pin(std::shared_ptr<cuda::PrimaryContext> context) {
    const std::scoped_lock lock(pin_mutex_);
    if (pinned_) return;
    page_lock_ = std::make_unique<cuda::PageLock>(std::move(context), region_);
    pinned_ = true;
}

}  // namespace datastates
