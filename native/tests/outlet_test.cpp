/// Files that are handed over: their bytes come in order, and blocks are held until they are given
/// back.
#include <atomic>
#include <list>
#include <thread>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;
using support::WriteCase;

namespace {

constexpr std::size_t kBlock = 65536;
constexpr support::Setup kSetup{.backend = "pwrite", .direct = false};

/// Takes all that comes, holds up to `held` of it, and then tells that the file is made.
Bytes take_all(Outlet& outlet, std::size_t held) {
    Bytes taken;
    std::list<std::unique_ptr<HandedBytes>> kept;
    for (;;) {
        std::unique_ptr<HandedBytes> next;
        CHECK(outlet.take({}, next));
        if (!next) break;
        taken.insert(taken.end(), next->bytes().begin(), next->bytes().end());
        kept.push_back(std::move(next));
        if (kept.size() > held) kept.pop_front();
    }
    kept.clear();
    outlet.finish();
    return taken;
}

}  // namespace

TEST(bytes_come_in_order_with_every_cache_size) {
    std::mt19937_64 random(1);
    for (const std::size_t blocks : {1, 2, 3, 16}) {
        const auto executor = support::make_executor(kSetup, blocks, kBlock);
        for (int round = 0; round < 40; ++round) {
            const WriteCase written = WriteCase::random(random, kBlock);
            const Bytes tail = support::random_bytes(random, random() % 9000);
            const auto outlet = std::make_shared<Outlet>("object");
            const std::size_t held = random() % blocks;
            Bytes taken;
            std::thread taker([&] { taken = take_all(*outlet, held); });
            const auto job = executor->submit_write(outlet, written.plan, written.buffers());
            CHECK(job->wait_captured());
            CHECK_EQ(job->backend_name(), std::string("handed"));
            job->finish(tail);
            taker.join();
            CHECK(job->written());
            Bytes expected = written.expected;
            expected.insert(expected.end(), tail.begin(), tail.end());
            CHECK(taken == expected);
            CHECK_EQ(job->stats().bytes, expected.size());
            CHECK_EQ(support::bytes_of(job->timeline(), Stage::write), written.expected.size());
            CHECK_THROWS(ErrorCode::closed, job->finish(tail));
        }
    }
}

TEST(a_file_is_handed_over_later) {
    std::mt19937_64 random(2);
    const auto executor = support::make_executor(kSetup, 4, kBlock);
    const WriteCase written =
        WriteCase::make({support::random_bytes(random, 1000)}, {1}, kBlock, 1000, random);
    const auto job = executor->submit_write({}, written.plan, written.buffers());
    CHECK(!job->made());
    const auto outlet = std::make_shared<Outlet>("object");
    job->create(outlet);
    CHECK(job->made());
    std::thread finisher([&] { job->finish({}); });
    CHECK(take_all(*outlet, 0) == written.expected);
    finisher.join();
}

TEST(it_is_not_written_before_all_is_given_back) {
    std::mt19937_64 random(3);
    const auto executor = support::make_executor(kSetup, 4, kBlock);
    const WriteCase written =
        WriteCase::make({support::random_bytes(random, 1000)}, {1}, kBlock, 1000, random);
    const auto outlet = std::make_shared<Outlet>("object");
    const auto job = executor->submit_write(outlet, written.plan, written.buffers());
    std::unique_ptr<HandedBytes> held;
    std::unique_ptr<HandedBytes> tail;
    CHECK(outlet->take({}, held));
    CHECK(job->wait_captured());
    job->hand_end({});
    CHECK(outlet->take({}, tail));
    outlet->finish();
    CHECK(!job->written());
    held.reset();
    CHECK(job->wait_written());
}

TEST(a_failure_of_the_taker_fails_the_job) {
    std::mt19937_64 random(4);
    const Error error(ErrorCode::io, EACCES, "write", "object", "write object: denied");
    for (const bool early : {true, false}) {
        const auto executor = support::make_executor(kSetup, 2, kBlock);
        const WriteCase written =
            WriteCase::make({support::random_bytes(random, 8 * kBlock)}, {0}, kBlock, 1000, random);
        const auto outlet = std::make_shared<Outlet>("object");
        if (early) outlet->fail(error);
        const auto job = executor->submit_write(outlet, written.plan, written.buffers());
        if (!early) {
            std::unique_ptr<HandedBytes> held;
            CHECK(outlet->take({}, held));
            outlet->fail(error);
        }
        try {
            job->finish({});
            CHECK(false);
        } catch (const Error& caught) {
            CHECK_EQ(caught.error_number(), EACCES);
            CHECK_EQ(caught.path(), std::string("object"));
        }
        std::unique_ptr<HandedBytes> next;
        CHECK_THROWS(ErrorCode::cancelled, static_cast<void>(outlet->take({}, next)));
        job->abort();
    }
}

TEST(a_taker_that_leaves_early_fails_the_job) {
    std::mt19937_64 random(6);
    for (const int takes : {-1, 0, 1, 3}) {
        const auto executor = support::make_executor(kSetup, 8, kBlock);
        const WriteCase written =
            WriteCase::make({support::random_bytes(random, 2 * kBlock)}, {0}, kBlock, 1000, random);
        const auto outlet = std::make_shared<Outlet>("object");
        if (takes < 0) outlet->finish();
        const auto job = executor->submit_write(outlet, written.plan, written.buffers());
        for (int i = 0; i < takes; ++i) {
            std::unique_ptr<HandedBytes> taken;
            CHECK(outlet->take({}, taken));
        }
        outlet->finish();
        try {
            job->finish({});
            CHECK(false);
        } catch (const Error& caught) {
            CHECK(caught.code() == ErrorCode::io);
            CHECK(std::string(caught.what()).find("not all of it was taken") != std::string::npos);
        }
    }
}

TEST(an_abort_ends_a_file_that_lacks_its_end_alone) {
    std::mt19937_64 random(7);
    const auto executor = support::make_executor(kSetup, 4, kBlock);
    const WriteCase written =
        WriteCase::make({support::random_bytes(random, 1000)}, {1}, kBlock, 1000, random);
    const auto outlet = std::make_shared<Outlet>("object");
    const auto job = executor->submit_write(outlet, written.plan, written.buffers());
    for (std::size_t i = 0; i < written.plan->extents().size(); ++i) {
        std::unique_ptr<HandedBytes> taken;
        CHECK(outlet->take({}, taken));
    }
    CHECK(job->wait_captured());
    job->abort();
    std::unique_ptr<HandedBytes> next;
    CHECK_THROWS(ErrorCode::cancelled, static_cast<void>(outlet->take({}, next)));
}

TEST(an_abort_waits_until_all_is_given_back) {
    std::mt19937_64 random(5);
    const auto executor = support::make_executor(kSetup, 2, kBlock);
    const WriteCase written =
        WriteCase::make({support::random_bytes(random, 8 * kBlock)}, {0}, kBlock, 1000, random);
    const auto outlet = std::make_shared<Outlet>("object");
    const auto job = executor->submit_write(outlet, written.plan, written.buffers());
    std::unique_ptr<HandedBytes> held;
    CHECK(outlet->take({}, held));
    std::atomic<bool> ended = false;
    std::thread aborter([&] {
        job->abort();
        ended = true;
    });
    std::unique_ptr<HandedBytes> next;
    try {
        while (outlet->take({}, next)) next.reset();
        CHECK(false);
    } catch (const Error& caught) {
        CHECK(caught.code() == ErrorCode::cancelled);
    }
    CHECK(!ended);
    held.reset();
    aborter.join();
    CHECK(ended);
}

CHECK_MAIN()
