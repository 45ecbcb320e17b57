#include "datastates/base/worker_pool.hpp"

#include <algorithm>
#include <new>
#include <optional>
#include <string>
#include <system_error>

#include "datastates/base/background.hpp"
#include "datastates/base/thread.hpp"

namespace datastates {
namespace {

constexpr unsigned kMostWorkers = 16;

}  // namespace

unsigned WorkerPool::default_size() {
    return std::clamp(std::thread::hardware_concurrency(), 1U, kMostWorkers);
}

void WorkerPool::submit(Task task) {
    {
        const std::scoped_lock lock(mutex_);
        if (idle_ > tasks_.size() || threads_.size() == size_ || grow() || !threads_.empty()) {
            tasks_.push_back(std::move(task));
            submitted_.notify_one();
            return;
        }
    }
    task(0);
}

/// Starts one more worker; false when the system refuses it.
bool WorkerPool::grow() {
    const auto worker = static_cast<unsigned>(threads_.size());
    try {
        threads_.push_back(
            start_thread("ds-worker-" + std::to_string(worker), [this, worker] { work(worker); }));
    } catch (const std::system_error&) {
        return false;  // the existing workers do the work
    } catch (const std::bad_alloc&) {
        return false;
    }
    return true;
}

void WorkerPool::work(unsigned worker) {
    work_in_background();
    std::unique_lock lock(mutex_);
    for (;;) {
        ++idle_;
        submitted_.wait(lock, [&] { return closed_ || !tasks_.empty(); });
        --idle_;
        if (tasks_.empty()) return;
        std::optional<Task> task = std::move(tasks_.front());
        tasks_.pop_front();
        lock.unlock();
        (*task)(worker);
        task.reset();  // release what it holds before the next wait
        lock.lock();
    }
}

void WorkerPool::close() {
    {
        const std::scoped_lock lock(mutex_);
        closed_ = true;
    }
    submitted_.notify_all();
    threads_.clear();
}

}  // namespace datastates
