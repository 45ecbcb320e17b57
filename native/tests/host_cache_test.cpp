#include "datastates/host_cache.hpp"

#include <atomic>
#include <set>
#include <thread>

#include "check.hpp"
#include "datastates/error.hpp"

using namespace datastates;

namespace {
const auto kNever = [] { return false; };
}  // namespace

TEST(blocks_are_disjoint_and_return) {
    HostCache cache(10 * 4096 + 5, 8192);
    CHECK_EQ(cache.bytes(), 5U * 8192U);
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
    const auto held = cache.acquire(kNever);
    std::atomic<bool> stop = false;
    std::jthread waiter([&] { CHECK(!cache.acquire([&] { return stop.load(); })); });
    stop = true;
    cache.poke();
    waiter.join();
    CHECK(!cache.acquire([] { return true; }));
}

TEST(many_threads_share_few_blocks) {
    HostCache cache(3 * 4096, 4096);
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

TEST(populates) {
    const HostCache cache(1 << 20, 4096);
    cache.populate({});
    CHECK(!cache.pinned());
}

CHECK_MAIN()
