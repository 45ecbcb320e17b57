#include <pthread.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <future>
#include <new>
#include <string_view>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/worker_pool.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::ReadCase;
using support::WriteCase;

namespace {

/// How many allocations of our threads succeed before one fails; negative: none fails.
std::atomic<long> left = -1;
std::atomic<bool> failed = false;

bool is_ours() {
    thread_local const bool ours = [] {
        char name[16] = {};
        ::pthread_getname_np(::pthread_self(), name, sizeof name);
        return std::string_view(name).starts_with("ds-");
    }();
    return ours;
}

void* allocate(std::size_t bytes) {
    if (left.load() >= 0 && is_ours() && left.fetch_sub(1) == 0) {
        failed = true;
        throw std::bad_alloc();
    }
    void* const memory = std::malloc(bytes == 0 ? 1 : bytes);
    if (memory == nullptr) throw std::bad_alloc();
    return memory;
}

}  // namespace

// Not inlined: otherwise GCC warns that free() releases memory of operator new.
[[gnu::noinline]] void* operator new(std::size_t bytes) { return allocate(bytes); }
[[gnu::noinline]] void* operator new[](std::size_t bytes) { return allocate(bytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete[](void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t /*bytes*/) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete[](void* memory, std::size_t /*bytes*/) noexcept {
    std::free(memory);
}

namespace {

constexpr std::size_t kBlock = 65536;

/// Runs an attempt again and again; each time the next allocation of our threads fails. The attempt
/// may then fail or not, but nothing else may happen.
template <typename Attempt>
void fail_each_in_turn(Attempt&& attempt) {
    for (long allowed = 0;; ++allowed) {
        failed = false;
        left = allowed;
        attempt();
        left = -1;
        if (!failed) return;
    }
}

void require_memory_error(const Error& error) { CHECK_EQ(error.error_number(), ENOMEM); }

}  // namespace

TEST(writes_end_in_an_error) {
    std::mt19937_64 random(1);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = WriteCase::make(
            {support::random_bytes(random, 5000), support::random_bytes(random, 400000)}, {1, 0},
            kBlock, 4096, random);
        int number = 0;
        fail_each_in_turn([&] {
            const auto path = dir / std::to_string(number++);
            const auto job = executor->submit_write(path, written.plan, written.buffers());
            try {
                job->wait_written();
            } catch (const Error& error) {
                require_memory_error(error);
            }
            CHECK(job->gate({}));
            job->abort();
        });
        executor->submit_write(dir / "good", written.plan, written.buffers())->finish({});
        CHECK(support::read_file(dir / "good") == written.expected);
    }
}

TEST(reads_end_in_an_error) {
    std::mt19937_64 random(2);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = WriteCase::make(
            {support::random_bytes(random, 5000), support::random_bytes(random, 400000)}, {1, 0},
            kBlock, 4096, random);
        executor->submit_write(dir / "f", written.plan, written.buffers())->finish({});
        ReadCase read = ReadCase::make(written, 50000, 3);
        fail_each_in_turn([&] {
            const auto job = executor->submit_read(dir / "f", read.plan, read.buffers());
            try {
                job->wait();
            } catch (const Error& error) {
                require_memory_error(error);
            }
        });
        CHECK(executor->submit_read(dir / "f", read.plan, read.buffers())->wait());
    }
}

TEST(errors_are_described_without_memory) {
    WorkerPool pool(1);
    std::promise<Error> described;
    failed = false;
    pool.submit(WorkerPool::Task([&](unsigned) {
        try {
            throw std::bad_alloc();
        } catch (...) {
            left = 0;
            const Error error = Error::current();
            left = -1;
            described.set_value(error);
        }
    }));
    require_memory_error(described.get_future().get());
    CHECK(!failed.load());
}

CHECK_MAIN()
