#include "datastates/base/background.hpp"

#include <sched.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <future>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>

#include "check.hpp"
#include "datastates/base/worker_pool.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::ReadCase;
using support::WriteCase;

namespace {

constexpr std::size_t kBlock = 256 * 1024;

/// How many threads of this process have the scheduler's usual class, without io_uring's kernel
/// threads.
int usual_threads() {
    int count = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        std::string name;
        std::ifstream(task.path() / "comm") >> name;
        const int id = std::stoi(task.path().filename().string());
        if (!name.starts_with("iou-") && ::sched_getscheduler(id) == SCHED_OTHER) ++count;
    }
    return count;
}

std::set<std::string> tasks() {
    std::set<std::string> all;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        all.insert(task.path().string());
    }
    return all;
}

std::uint64_t blocked_signals(const std::string& task) {
    std::ifstream status(task + "/status");
    for (std::string word; status >> word;) {
        if (word != "SigBlk:") continue;
        status >> word;
        return std::stoull(word, nullptr, 16);
    }
    throw std::runtime_error("no SigBlk in " + task);
}

}  // namespace

TEST(workers_are_in_the_background) {
    WorkerPool pool(1);
    std::promise<int> policy;
    pool.submit(WorkerPool::Task([&](unsigned) { policy.set_value(::sched_getscheduler(0)); }));
    const int own = ::sched_getscheduler(0);
    const bool few = std::thread::hardware_concurrency() <= kFewCores;
    CHECK_EQ(policy.get_future().get(), few && own == SCHED_OTHER ? SCHED_BATCH : own);
}

TEST(only_the_reader_and_the_writer_are_not_in_the_background) {
    if (::sched_getscheduler(0) != SCHED_OTHER || std::thread::hardware_concurrency() > kFewCores) {
        std::cout << "SKIPPED: with so many cores, or in this class, no thread is\n" << std::flush;
        return;
    }
    std::mt19937_64 random(7);
    const support::TempDir dir;
    const int before = usual_threads();
    const auto executor = support::make_executor({"auto", true}, 4, kBlock);
    const WriteCase written =
        WriteCase::make({support::random_bytes(random, 1000000)}, {0}, kBlock, 4096, random);
    ReadCase read = ReadCase::make(written, 100000, 3);
    executor->submit_write(dir / "f", written.plan, written.buffers())->finish({});
    CHECK(executor->submit_read(dir / "f", read.plan, read.buffers())->wait());
    // Those that are not to leave the class get time to. A thread has it until it begins, and one
    // of io_uring's own has another name until then.
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    int usual = usual_threads();
    for (; usual > before + 2; usual = usual_threads()) std::this_thread::yield();
    CHECK_EQ(usual, before + 2);
}

TEST(all_threads_are_named_and_leave_signals_to_others) {
    std::mt19937_64 random(8);
    const support::TempDir dir;
    const std::set<std::string> before = tasks();
    const auto executor = support::make_executor({"pwrite", true}, 4, kBlock);
    const WriteCase written =
        WriteCase::make({support::random_bytes(random, 1000000)}, {0}, kBlock, 4096, random);
    ReadCase read = ReadCase::make(written, 100000, 3);
    executor->submit_write(dir / "f", written.plan, written.buffers())->finish({});
    CHECK(executor->submit_read(dir / "f", read.plan, read.buffers())->wait());
    std::set<std::string> names;
    for (const std::string& task : tasks()) {
        if (before.contains(task)) continue;
        std::string name;
        // A thread sets its name when it begins.
        while (!name.starts_with("ds-"))
            std::getline(std::ifstream(task + "/comm") >> std::ws, name);
        names.insert(name);
        const std::uint64_t blocked = blocked_signals(task);
        for (const int taken : {SIGTERM, SIGINT, SIGUSR1, SIGCHLD, SIGPROF}) {
            CHECK((blocked & (std::uint64_t{1} << (taken - 1))) != 0);
        }
        for (const int own : {SIGSEGV, SIGBUS, SIGABRT}) {
            CHECK((blocked & (std::uint64_t{1} << (own - 1))) == 0);
        }
    }
    for (const auto* name : {"ds-writer", "ds-reader", "ds-capturer", "ds-cache-0", "ds-worker-0",
                             "ds-io-0", "ds-io-2"}) {
        CHECK(names.contains(name));
    }
    CHECK_EQ(blocked_signals("/proc/thread-self"), 0U);
}

CHECK_MAIN()
