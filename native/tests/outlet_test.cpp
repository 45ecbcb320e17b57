/// Files that are handed over: their bytes come in order, and blocks are held until they are given
/// back.
#include <atomic>
#include <list>
#include <stdexcept>
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

/// A job of one source that is handed over.
struct Handing {
    Handing(std::size_t blocks, std::size_t nbytes, bool eager)
        : executor(support::make_executor(kSetup, blocks, kBlock)),
          written(WriteCase::make({support::random_bytes(random, nbytes)}, {eager}, kBlock, 1000,
                                  random)) {}

    std::unique_ptr<WriteJob> submit() const {
        return executor->submit_write(outlet, written.plan, written.buffers());
    }
    std::unique_ptr<HandedBytes> take() const {
        std::unique_ptr<HandedBytes> next;
        CHECK(outlet->take({}, next));
        return next;
    }
    static Error failure_of(WriteJob& job) {
        try {
            job.finish({});
        } catch (const Error& error) {
            return error;
        }
        throw std::runtime_error("the job has not failed");
    }

    std::mt19937_64 random{2};
    std::shared_ptr<Executor> executor;
    WriteCase written;
    std::shared_ptr<Outlet> outlet = std::make_shared<Outlet>("object");
};

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
    const Handing a(4, 1000, true);
    const auto job = a.executor->submit_write({}, a.written.plan, a.written.buffers());
    CHECK(!job->made());
    job->create(a.outlet);
    CHECK(job->made());
    std::thread finisher([&] { job->finish({}); });
    CHECK(take_all(*a.outlet, 0) == a.written.expected);
    finisher.join();
}

TEST(it_is_not_written_before_all_is_given_back) {
    const Handing a(4, 1000, true);
    const auto job = a.submit();
    auto held = a.take();
    CHECK(job->wait_captured());
    job->hand_end({});
    const auto tail = a.take();
    a.outlet->finish();
    CHECK(!job->written());
    held.reset();
    CHECK(job->wait_written());
}

TEST(a_failure_of_the_taker_fails_the_job) {
    const Error error(ErrorCode::io, EACCES, "write", "object", "write object: denied");
    for (const bool early : {true, false}) {
        const Handing a(2, 8 * kBlock, false);
        if (early) a.outlet->fail(error);
        const auto job = a.submit();
        if (!early) {
            const auto held = a.take();
            a.outlet->fail(error);
        }
        const Error failure = Handing::failure_of(*job);
        CHECK_EQ(failure.error_number(), EACCES);
        CHECK_EQ(failure.path(), std::string("object"));
        CHECK_THROWS(ErrorCode::cancelled, static_cast<void>(a.take()));
        job->abort();
    }
}

TEST(a_taker_that_leaves_early_fails_the_job) {
    for (const int takes : {-1, 0, 1, 3}) {
        const Handing a(8, 2 * kBlock, false);
        if (takes < 0) a.outlet->finish();
        const auto job = a.submit();
        for (int i = 0; i < takes; ++i) static_cast<void>(a.take());
        a.outlet->finish();
        const Error failure = Handing::failure_of(*job);
        CHECK(failure.code() == ErrorCode::io);
        CHECK(std::string(failure.what()).ends_with("not all of it was taken"));
    }
}

TEST(an_abort_ends_a_file_that_lacks_its_end_alone) {
    const Handing a(4, 1000, true);
    const auto job = a.submit();
    for (std::size_t i = 0; i < a.written.plan->extents().size(); ++i) static_cast<void>(a.take());
    CHECK(job->wait_captured());
    job->abort();
    CHECK_THROWS(ErrorCode::cancelled, static_cast<void>(a.take()));
}

TEST(an_abort_waits_until_all_is_given_back) {
    const Handing a(2, 8 * kBlock, false);
    const auto job = a.submit();
    auto held = a.take();
    std::atomic<bool> ended = false;
    std::thread aborter([&] {
        job->abort();
        ended = true;
    });
    const auto take_on = [&] {
        for (;;) static_cast<void>(a.take());
    };
    CHECK_THROWS(ErrorCode::cancelled, take_on());
    CHECK(!ended);
    held.reset();
    aborter.join();
    CHECK(ended);
}

CHECK_MAIN()
