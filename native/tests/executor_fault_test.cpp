#include <cerrno>
#include <chrono>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::WriteCase;

namespace {

constexpr std::size_t kBlock = 65536;

WriteCase make_case(std::mt19937_64& random) {
    return WriteCase::make(
        {support::random_bytes(random, 5000), support::random_bytes(random, 400000)}, {1, 0},
        kBlock, 4096, random);
}

/// After a failure, the executor must go on as if nothing had happened.
void check_serves(Executor& executor, const std::string& path, std::mt19937_64& random) {
    fault::clear();
    const WriteCase written = make_case(random);
    const auto job = executor.submit_write(path, written.plan, written.buffers());
    job->finish({});
    CHECK(support::read_file(path) == written.expected);
}

}  // namespace

TEST(creating_fails_at_each_point) {
    std::mt19937_64 random(1);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const support::FaultScope scope;
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        support::write_file(dir / "taken", support::Bytes(1));
        for (const auto& [point, error] :
             {std::pair{"open", EACCES}, {"allocate", ENOSPC}, {"taken", EEXIST}}) {
            if (error != EEXIST) fault::arm(point, "fail", error, 1, 1);
            const auto job = executor->submit_write(dir / point, written.plan, written.buffers());
            try {
                job->wait_written();
                CHECK(false);
            } catch (const Error& failure) {
                CHECK_EQ(failure.error_number(), error);
                CHECK_EQ(failure.path(), dir / point);
            }
            if (error != ENOSPC) CHECK_THROWS(ErrorCode::io, job->wait_made());
            CHECK(job->gate({}));
            CHECK_THROWS(ErrorCode::io, job->finish({}));
            job->abort();
            CHECK_EQ(job->made(), error == ENOSPC);
        }
        CHECK_EQ(support::read_file(dir / "taken").size(), 1U);
        check_serves(*executor, dir / "h", random);
    }
}

TEST(a_held_capture_takes_nothing_lazy) {
    std::mt19937_64 random(3);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const support::FaultScope scope;
        const auto executor = support::make_executor(setup, 2, kBlock);
        // Both sources share the first block.
        const WriteCase written = WriteCase::make(
            {support::random_bytes(random, 5000), support::random_bytes(random, 5000)}, {1, 0},
            kBlock, 4096, random);
        fault::arm("capture", "fail", EAGAIN, 1, 0);
        const auto job = executor->submit_write(dir / "f", written.plan, written.buffers());
        CHECK(!job->wait_captured(Clock::now() + std::chrono::milliseconds(50)));
        fault::clear();
        job->finish({});
        CHECK(support::read_file(dir / "f") == written.expected);
    }
}

TEST(every_write_may_fail) {
    std::mt19937_64 random(2);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const support::FaultScope scope;
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        for (std::uint64_t nth = 1; nth <= written.plan->extents().size(); ++nth) {
            const std::string path = dir / std::to_string(nth);
            fault::arm("write", "fail", ENOSPC, nth, 1);
            const auto job = executor->submit_write(path, written.plan, written.buffers());
            try {
                job->wait_written();
                job->finish({});
                CHECK(false);
            } catch (const Error& error) {
                CHECK_EQ(to_string(error.code()), "io");
                CHECK_EQ(error.error_number(), ENOSPC);
                CHECK_EQ(error.op(), "write");
                CHECK_EQ(error.path(), path);
            }
            CHECK(job->gate({}));
            job->abort();
            check_serves(*executor, path + "b", random);
        }
    }
}

TEST(writes_survive_short_and_interrupted_calls) {
    std::mt19937_64 random(3);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        for (const auto* action : {"short", "eintr", "delay"}) {
            const support::FaultScope scope;
            const auto executor = support::make_executor(setup, 2, kBlock);
            const WriteCase written = make_case(random);
            fault::arm("write", action, 1, 1, 20);
            const auto job = executor->submit_write(dir / action, written.plan, written.buffers());
            job->finish(support::Bytes(5000));
            auto expected = written.expected;
            expected.resize(expected.size() + 5000);
            CHECK(support::read_file(dir / action) == expected);
        }
    }
}

TEST(finish_fails_at_each_point) {
    std::mt19937_64 random(4);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const support::FaultScope scope;
        const auto executor = support::make_executor(setup, 2, kBlock);
        for (const auto* point : {"write", "sync", "close"}) {
            const WriteCase written = make_case(random);
            const auto job = executor->submit_write(dir / point, written.plan, written.buffers());
            job->wait_written();
            fault::arm(point, "fail", EIO, 1, 1);
            CHECK_THROWS(ErrorCode::io, job->finish(support::Bytes(10)));
            // A second try must not accept a file whose first sync failed.
            CHECK_THROWS(ErrorCode::io, job->finish(support::Bytes(10)));
            check_serves(*executor, dir / (std::string(point) + "b"), random);
        }
    }
}

TEST(other_jobs_are_not_affected) {
    std::mt19937_64 random(5);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const support::FaultScope scope;
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase first = make_case(random);
        const WriteCase second = make_case(random);
        fault::arm("write", "fail", EIO, 1, 1);
        const auto bad = executor->submit_write(dir / "bad", first.plan, first.buffers());
        CHECK_THROWS(ErrorCode::io, bad->wait_written());
        const auto good = executor->submit_write(dir / "good", second.plan, second.buffers());
        good->finish({});
        CHECK(support::read_file(dir / "good") == second.expected);
    }
}

TEST(falls_back_to_pwrite) {
    const support::FaultScope scope;
    fault::arm("uring_setup", "fail", EPERM, 1, 0);
    CHECK_EQ(support::make_executor({"auto", true}, 2, kBlock)->backend_name(), "pwrite");
    CHECK_THROWS(ErrorCode::io, support::make_executor({"io_uring", true}, 2, kBlock));
}

TEST(a_ring_refused_in_the_middle_loses_nothing_and_holds_nobody_up) {
    std::mt19937_64 random(6);
    for (const support::Setup& setup : support::setups()) {
        if (setup.backend != std::string_view("io_uring")) continue;
        const support::TempDir dir(setup);
        for (const std::uint64_t nth : {1, 4}) {
            const support::FaultScope scope;
            const auto executor = support::make_executor(setup, 2, kBlock);
            const WriteCase written = make_case(random);
            fault::arm("uring_enter", "fail", EPERM, nth, 0);
            const std::string path = dir / std::to_string(nth);
            const auto job = executor->submit_write(path, written.plan, written.buffers());
            job->finish({});
            CHECK(support::read_file(path) == written.expected);
            executor->submit_write(path + "b", written.plan, written.buffers())->abort();
            check_serves(*executor, path + "c", random);
        }
    }
}

CHECK_MAIN()
