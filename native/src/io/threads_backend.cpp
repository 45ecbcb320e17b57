#include "datastates/io/threads_backend.hpp"

#include <string>
#include <utility>

#include "datastates/base/background.hpp"
#include "datastates/base/thread.hpp"

namespace datastates {

ThreadsBackend::ThreadsBackend(unsigned threads) {
    threads_.reserve(threads);
    for (unsigned i = 0; i < threads; ++i) {
        threads_.push_back(start_thread("ds-io-" + std::to_string(i),
                                        [this, i](const std::stop_token& stop) { work(i, stop); }));
    }
}

ThreadsBackend::~ThreadsBackend() {
    // Each thread finishes its current request and then sees the stop.
    for (auto& thread : threads_) thread.request_stop();
    threads_.clear();
}

void ThreadsBackend::submit(const IoRequest& request) {
    {
        const std::scoped_lock lock(mutex_);
        completions_.reserve(in_flight_ + 1);  // so that the threads allocate no memory
        requests_.push_back(request);
    }
    ++in_flight_;
    requested_.notify_one();
}

std::vector<IoCompletion> ThreadsBackend::reap(bool wait) {
    std::unique_lock lock(mutex_);
    if (wait && in_flight_ > 0) {
        completed_.wait(lock, [&] { return woken_ || !completions_.empty(); });
    }
    woken_ = false;
    std::vector<IoCompletion> reaped = completions_;
    completions_.clear();  // keeps the reserved room
    in_flight_ -= reaped.size();
    return reaped;
}

void ThreadsBackend::wake() {
    {
        const std::scoped_lock lock(mutex_);
        woken_ = true;
    }
    completed_.notify_one();
}

void ThreadsBackend::work(unsigned thread, const std::stop_token& stop) {
    work_in_background();
    std::unique_lock lock(mutex_);
    while (requested_.wait(lock, stop, [&] { return !requests_.empty(); })) {
        if (stop.stop_requested()) return;
        const IoRequest request = requests_.front();
        requests_.pop_front();
        lock.unlock();
        IoCompletion completion = request.file->transfer(request);
        completion.note_end(thread);
        lock.lock();
        completions_.push_back(completion);
        completed_.notify_one();
    }
}

}  // namespace datastates
