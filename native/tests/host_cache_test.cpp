#include "datastates/memory/host_cache.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <set>
#include <thread>
#include <vector>

#include "check.hpp"
#include "datastates/base/error.hpp"

using namespace datastates;

namespace {
const auto kNever = [] { return false; };
constexpr std::size_t kMiB = std::size_t{1} << 20;

std::size_t resident_pages(std::span<std::byte> memory) {
    std::vector<unsigned char> pages(memory.size() / 4096);
    CHECK(::mincore(memory.data(), memory.size(), pages.data()) == 0);
    return static_cast<std::size_t>(
        std::ranges::count_if(pages, [](unsigned char page) { return (page & 1) != 0; }));
}
}  // namespace

TEST(blocks_are_disjoint_and_return) {
    HostCache cache(10 * 4096 + 5, 8192);
    CHECK_EQ(cache.bytes(), 5U * 8192U);
    CHECK(!cache.try_acquire());
    cache.reserve(1);
    CHECK_EQ(cache.reserved(), cache.bytes());
    cache.wait_settled();
    {
        std::set<std::byte*> seen;
        std::vector<Block> blocks;
        while (auto block = cache.try_acquire()) {
            CHECK_EQ(block->memory().size(), 8192U);
            CHECK(seen.insert(block->memory().data()).second);
            std::fill(block->memory().begin(), block->memory().end(), std::byte{1});
            blocks.push_back(std::move(*block));
        }
        CHECK_EQ(blocks.size(), 5U);
    }
    CHECK(cache.try_acquire().has_value());
}

TEST(refuses_bad_sizes) {
    CHECK_THROWS(ErrorCode::invalid, HostCache(1 << 20, 4095));
    CHECK_THROWS(ErrorCode::invalid, HostCache(1 << 20, 0));
    CHECK_THROWS(ErrorCode::invalid, HostCache(4095, 4096));
}

TEST(waits_for_a_block) {
    HostCache cache(4096, 4096);
    cache.reserve(4096);
    auto held = cache.acquire(kNever);
    std::atomic<bool> got = false;
    std::jthread waiter([&] {
        const auto block = cache.acquire(kNever);
        got = block.has_value();
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!got);
    held.reset();
    waiter.join();
    CHECK(got);
}

TEST(gives_up_when_poked) {
    HostCache cache(4096, 4096);
    cache.reserve(4096);
    const auto held = cache.acquire(kNever);
    std::atomic<bool> stop = false;
    std::jthread waiter([&] { CHECK(!cache.acquire([&] { return stop.load(); })); });
    stop = true;
    cache.poke();
    waiter.join();
    CHECK(!cache.acquire([] { return true; }));
}

TEST(tells_when_memory_has_become_usable) {
    HostCache cache(64 * kMiB, 4 * kMiB);
    std::atomic<unsigned> calls = 0;
    cache.watch(&calls, [&] { ++calls; });
    cache.reserve(kMiB);
    cache.wait_settled();
    CHECK(calls >= 4);  // a piece has four blocks
    cache.watch(&calls, {});
    const unsigned before = calls;
    cache.reserve(cache.bytes());
    cache.wait_settled();
    CHECK_EQ(calls.load(), before);
}

TEST(what_is_prepared_gives_way_to_a_hurry) {
    HostCache cache(64 * kMiB, 4 * kMiB);
    {
        const HostCache::Hurry first(cache);
        const HostCache::Hurry second(cache);
        cache.prepare(48 * kMiB);
        cache.wait_settled();
        CHECK_EQ(cache.reserved(), 48 * kMiB);
        CHECK(cache.populated().empty());
        cache.reserve(16 * kMiB);
        cache.wait_settled();
        CHECK_EQ(cache.populated().size(), 16 * kMiB);
    }
    cache.wait_settled();
    CHECK_EQ(cache.populated().size(), 48 * kMiB);
    cache.reserve(32 * kMiB);  // it is there
    cache.wait_settled();
    CHECK_EQ(cache.populated().size(), 48 * kMiB);
}

TEST(many_threads_share_few_blocks) {
    HostCache cache(3 * 4096, 4096);
    cache.reserve(3 * 4096);
    std::vector<std::jthread> threads;
    for (int i = 0; i < 6; ++i) {
        threads.emplace_back([&cache, i] {
            for (int round = 0; round < 300; ++round) {
                const auto block = cache.acquire(kNever);
                const auto mark = static_cast<std::byte>(i);
                std::fill(block->memory().begin(), block->memory().end(), mark);
                for (const std::byte byte : block->memory()) CHECK(byte == mark);
            }
        });
    }
}

TEST(grows_to_what_is_reserved) {
    HostCache cache(150 * kMiB, kMiB);
    CHECK_EQ(cache.piece_bytes(), 16 * kMiB);
    CHECK_EQ(cache.reserved(), 0U);
    CHECK(cache.populated().empty());
    cache.reserve(kMiB);
    CHECK_EQ(cache.reserved(), 16 * kMiB);
    cache.wait_settled();
    CHECK_EQ(cache.populated().size(), 16 * kMiB);
    CHECK_EQ(resident_pages(cache.populated()), 16 * kMiB / 4096);
    const std::span<std::byte> beyond(cache.populated().data() + (16 * kMiB), 134 * kMiB);
    CHECK_EQ(resident_pages(beyond), 0U);

    std::vector<Block> blocks;
    while (auto block = cache.try_acquire()) blocks.push_back(std::move(*block));
    CHECK_EQ(blocks.size(), 16U);
    CHECK(!cache.pinned() && !blocks.front().page_locked());
    cache.reserve(1);  // less than before: nothing happens
    CHECK(!cache.try_acquire());
    cache.reserve(1000 * kMiB);
    CHECK_EQ(cache.reserved(), 150 * kMiB);
    cache.wait_settled();
    CHECK_EQ(cache.populated().size(), cache.bytes());
    while (auto block = cache.try_acquire()) blocks.push_back(std::move(*block));
    CHECK_EQ(blocks.size(), 150U);
}

TEST(blocks_have_their_pages_before_they_are_used) {
    HostCache cache(64 * kMiB, 4 * kMiB);
    cache.reserve(cache.bytes());
    std::vector<Block> blocks;
    for (int i = 0; i < 16; ++i) {
        blocks.push_back(std::move(*cache.acquire(kNever)));
        CHECK_EQ(resident_pages(blocks.back().memory()), 4 * kMiB / 4096);
        // what is written stays, while the memory of other blocks comes
        std::ranges::fill(blocks.back().memory(), static_cast<std::byte>(i + 1));
    }
    cache.wait_settled();
    for (int i = 0; i < 16; ++i) {
        const auto mark = static_cast<std::byte>(i + 1);
        const auto memory = blocks[static_cast<std::size_t>(i)].memory();
        CHECK(std::ranges::all_of(memory, [&](std::byte byte) { return byte == mark; }));
    }
}

TEST(waits_for_memory_to_be_reserved) {
    HostCache cache(4096, 4096);
    std::atomic<bool> got = false;
    std::jthread waiter([&] {
        const auto block = cache.acquire(kNever);
        got = block.has_value();
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!got);
    cache.reserve(1);
    waiter.join();
    CHECK(got);
}

TEST(hands_out_the_lowest_addresses) {
    HostCache cache(8 * 4096, 4096);
    cache.reserve(8 * 4096);
    cache.wait_settled();
    std::vector<Block> blocks;
    while (auto block = cache.try_acquire()) blocks.push_back(std::move(*block));
    CHECK(std::ranges::is_sorted(blocks, {}, [](const Block& b) { return b.memory().data(); }));
    std::byte* const lowest = blocks[2].memory().data();
    blocks[5].reset();
    blocks[2].reset();
    blocks[7].reset();
    CHECK(cache.try_acquire()->memory().data() == lowest);
}

TEST(ends_while_memory_comes) {
    for (int round = 0; round < 5; ++round) {
        HostCache cache(256 * kMiB, kMiB);
        cache.reserve(256 * kMiB);
    }
}

TEST(no_page_is_of_two_pieces) {
    for (const std::size_t page : {4096, 16384, 65536}) {
        for (const std::size_t block :
             {std::size_t{4096}, (std::size_t{1} << 20) + 4096, (std::size_t{96} << 20) + 4096}) {
            const HostCache cache(64 * block, block, page);
            CHECK_EQ(cache.piece_bytes() % page, 0U);
            CHECK_EQ(cache.piece_bytes() % block, 0U);
        }
    }
}

CHECK_MAIN()
