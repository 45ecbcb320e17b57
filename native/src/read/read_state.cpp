#include "datastates/read/read_state.hpp"

#include <utility>

#include "datastates/base/error.hpp"

namespace datastates {

ReadState::ReadState(File file, std::shared_ptr<const ReadPlan> plan, Buffers buffers)
    : plan_(std::move(plan)), buffers_(std::move(buffers)), file_(std::move(file)) {
    stats_.bytes_needed = plan_->bytes();
    stats_.direct = file_.direct();
}

void ReadState::add_engine(int device, std::shared_ptr<CopyEngine> engine) {
    engines_.emplace(device, std::move(engine));
}

void ReadState::add_producer(int device, std::shared_ptr<Event> event) {
    producers_.emplace_back(device, std::move(event));
}

void ReadState::order_after_producers() {
    for (const auto& [device, event] : std::exchange(producers_, {})) {
        const CopyEngine& copies = engine(device);
        copies.wait(copies.restore_stream(), *event);
    }
}

void ReadState::fail(std::size_t extent, const Error& error) {
    const std::scoped_lock lock(mutex_);
    if (!error_ || extent < error_extent_) {
        error_ = error;
        error_extent_ = extent;
    }
    stopped_.store(true, std::memory_order_release);
}

bool ReadState::settled(std::size_t extent) const {
    if (!stopped()) return false;
    const std::scoped_lock lock(mutex_);
    return error_ && extent >= error_extent_;
}

void ReadState::finish(ReadStats stats) {
    file_.close();
    const std::scoped_lock lock(mutex_);
    stats.bytes_needed = stats_.bytes_needed;
    stats.seconds = seconds_since(start_);
    stats_ = stats;
    done_ = true;
    changed_.notify_all();
}

void ReadState::stop() {
    const std::scoped_lock lock(mutex_);
    if (done_) return;
    if (!error_) error_ = Error::cancelled();
    error_extent_ = 0;
    stopped_.store(true, std::memory_order_release);
}

bool ReadState::wait(std::optional<Clock::time_point> deadline) const {
    std::unique_lock lock(mutex_);
    if (deadline) {
        if (!changed_.wait_until(lock, *deadline, [&] { return done_; })) return false;
    } else {
        changed_.wait(lock, [&] { return done_; });
    }
    if (error_) throw Error(*error_);
    return true;
}

void ReadState::wait_done() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return done_; });
}

bool ReadState::done() const {
    const std::scoped_lock lock(mutex_);
    return done_;
}

ReadStats ReadState::stats() const {
    const std::scoped_lock lock(mutex_);
    return stats_;
}

}  // namespace datastates
