#include "datastates/base/worker_pool.hpp"

#include <atomic>
#include <latch>
#include <memory>
#include <set>

#include "check.hpp"

using namespace datastates;
using Task = WorkerPool::Task;

TEST(runs_everything_before_it_closes) {
    std::atomic<int> done = 0;
    WorkerPool pool(3);
    for (int i = 0; i < 1000; ++i) {
        pool.submit(Task([&](unsigned worker) { done += worker < 3 ? 1 : 1000000; }));
    }
    pool.close();
    CHECK_EQ(done.load(), 1000);
}

TEST(all_workers_run_at_once_and_know_their_number) {
    WorkerPool pool(4);
    std::mutex mutex;
    std::set<unsigned> seen;
    std::latch together(4);  // passed only when four tasks run at the same time
    for (int i = 0; i < 4; ++i) {
        pool.submit(Task([&](unsigned worker) {
            together.arrive_and_wait();
            const std::scoped_lock lock(mutex);
            seen.insert(worker);
        }));
    }
    pool.close();
    CHECK_EQ(seen.size(), 4U);
    CHECK_EQ(*seen.rbegin(), 3U);
}

TEST(one_worker_runs_tasks_in_order) {
    WorkerPool pool(1);
    std::vector<int> order;
    for (int i = 0; i < 100; ++i) {
        pool.submit(Task([&order, i](unsigned) { order.push_back(i); }));
    }
    pool.close();
    for (int i = 0; i < 100; ++i) CHECK_EQ(order.at(static_cast<std::size_t>(i)), i);
}

TEST(tasks_may_own_what_cannot_be_copied) {
    WorkerPool pool(2);
    std::atomic<int> sum = 0;
    for (int i = 0; i < 10; ++i) {
        auto owned = std::make_unique<int>(i);
        pool.submit(Task([&sum, owned = std::move(owned)](unsigned) { sum += *owned; }));
    }
    pool.close();
    CHECK_EQ(sum.load(), 45);
}

TEST(default_size_is_bounded) {
    CHECK(WorkerPool::default_size() >= 1);
    CHECK(WorkerPool::default_size() <= 16);
}

CHECK_MAIN()
