#include "datastates/read/read_inbox.hpp"

#include <utility>

namespace datastates {

void ReadInbox::put(ReadRuns& job) {
    const std::scoped_lock lock(mutex_);
    queue_.splice(queue_.end(), job);
    wake_locked();
}

void ReadInbox::put(Readings& worked) {
    // The lock is kept to the end: the reader may be gone once it is released.
    const std::scoped_lock lock(mutex_);
    worked_.splice(worked_.end(), worked);
    wake_locked();
}

void ReadInbox::look_again() {
    const std::scoped_lock lock(mutex_);
    look_again_ = true;
    wake_locked();
}

void ReadInbox::wake_locked() {
    changed_.notify_one();
    if (reaping_) backend_.wake();
}

bool ReadInbox::wait_for_job(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    return changed_.wait(lock, stop, [&] { return !queue_.empty(); });
}

ReadRuns ReadInbox::take_job() {
    ReadRuns taken;
    const std::scoped_lock lock(mutex_);
    if (!queue_.empty()) taken.splice(taken.end(), queue_, queue_.begin());
    return taken;
}

Readings ReadInbox::take_worked(bool wait, bool may_begin) {
    std::unique_lock lock(mutex_);
    if (wait) changed_.wait(lock, [&] { return has_work(may_begin); });
    look_again_ = false;
    return std::exchange(worked_, {});
}

std::vector<IoCompletion> ReadInbox::reap(bool may_begin) {
    const auto set = [&](bool reaping) {
        const std::scoped_lock lock(mutex_);
        reaping_ = reaping && !has_work(may_begin);
        return reaping_;
    };
    const bool wait = set(true);
    try {
        auto completions = backend_.reap(wait);
        set(false);
        return completions;
    } catch (...) {
        set(false);
        throw;
    }
}

}  // namespace datastates
