#include "datastates/read/read_state.hpp"

#include <utility>

#include "datastates/base/error.hpp"

namespace datastates {

ReadState::ReadState(std::unique_ptr<File> file, std::shared_ptr<const ReadPlan> plan,
                     Buffers buffers)
    : plan_(std::move(plan)), buffers_(std::move(buffers)), file_(std::move(file)) {
    stats_.bytes_needed = plan_->bytes();
    stats_.direct = file_->direct();
}

void ReadState::fail(std::size_t extent, const Error& error) {
    const std::scoped_lock lock(mutex_);
    if (!error_ || extent < error_extent_) {
        error_ = error;
        error_extent_ = extent;
        file_->give_up(extent);
    }
    stopped_.store(true, std::memory_order_release);
}

bool ReadState::settled(std::size_t extent) const {
    if (!stopped()) return false;
    const std::scoped_lock lock(mutex_);
    return error_ && extent >= error_extent_;
}

void ReadState::finish(ReadStats stats) {
    file_->close();
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
    file_->give_up(0);
    stopped_.store(true, std::memory_order_release);
}

bool ReadState::wait(Deadline deadline) const {
    std::unique_lock lock(mutex_);
    if (!wait_until(changed_, lock, deadline, [&] { return done_; })) return false;
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
