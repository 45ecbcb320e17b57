#include "datastates/base/fault.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <thread>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "support.hpp"

using namespace datastates;
using fault::Point;

TEST(unarmed_points_do_nothing) {
    const support::FaultScope scope;
    CHECK(!fault::hit(Point::write));
    fault::arm("read", "fail", EIO, 1, 0);
    CHECK(!fault::hit(Point::write));
}

TEST(counts_hits_and_triggers) {
    const support::FaultScope scope;
    fault::arm("write", "fail", ENOSPC, 3, 2);
    CHECK(!fault::hit(Point::write));
    CHECK(!fault::hit(Point::write));
    CHECK_EQ(fault::hit_error(Point::write), ENOSPC);
    CHECK_EQ(fault::hit_error(Point::write), ENOSPC);
    CHECK(!fault::hit(Point::write));
}

TEST(goes_on_for_ever_with_count_0) {
    const support::FaultScope scope;
    fault::arm("sync", "fail", EIO, 1, 0);
    for (int i = 0; i < 100; ++i) CHECK_EQ(fault::hit_error(Point::sync), EIO);
    fault::clear();
    CHECK(!fault::hit(Point::sync));
}

TEST(interrupts_once) {
    const support::FaultScope scope;
    fault::arm("open", "eintr", 0, 1, 0);
    CHECK_EQ(fault::hit_error(Point::open), EINTR);
    CHECK(!fault::hit(Point::open));
}

TEST(delays) {
    const support::FaultScope scope;
    fault::arm("open", "delay", 30, 1, 1);
    const auto start = Clock::now();
    CHECK(!fault::hit(Point::open));
    CHECK(seconds_since(start) >= 0.03);
}

TEST(clearing_ends_a_delay) {
    const support::FaultScope scope;
    fault::arm("open", "delay", 3'600'000, 1, 1);
    std::thread clearing([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        fault::clear();
    });
    CHECK(!fault::hit(Point::open));
    clearing.join();
}

TEST(kills) {
    const pid_t child = ::fork();
    if (child == 0) {
        fault::arm("close", "kill", 0, 1, 1);
        static_cast<void>(fault::hit(Point::close));
        ::_exit(0);
    }
    int status = 0;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
}

TEST(refuses_unknown_names) {
    CHECK_THROWS(ErrorCode::invalid, fault::arm("nowhere", "fail", EIO, 1, 1));
    CHECK_THROWS(ErrorCode::invalid, fault::arm("open", "explode", EIO, 1, 1));
    CHECK_THROWS(ErrorCode::invalid, fault::arm("open", "fail", 0, 1, 1));
    CHECK_THROWS(ErrorCode::invalid, fault::arm("open", "fail", EIO, 0, 1));
}

CHECK_MAIN()
