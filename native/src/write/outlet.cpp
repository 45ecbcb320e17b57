#include "datastates/write/outlet.hpp"

#include <utility>

#include "datastates/write/captured_extent.hpp"

namespace datastates {

HandedBytes::HandedBytes(std::shared_ptr<Outlet> outlet, std::unique_ptr<CapturedExtent>& extent)
    : outlet_(std::move(outlet)),
      track_(outlet_->tracks_.take()),
      extent_(std::move(extent)),
      bytes_(extent_->block.memory().first(extent_->extent().length)) {}

HandedBytes::HandedBytes(std::shared_ptr<Outlet> outlet, std::vector<std::byte> tail)
    : outlet_(std::move(outlet)), tail_(std::move(tail)), bytes_(tail_) {}

HandedBytes::~HandedBytes() {
    if (!extent_) return;
    extent_->job->timeline().add(Stage::write, track_, begin_, bytes_.size());
    {
        const std::scoped_lock lock(outlet_->mutex_);
        outlet_->tracks_.give_back(track_);
    }
    retire(std::move(extent_));
}

Outlet::Outlet(std::string name) : name_(std::move(name)) {}

Outlet::~Outlet() = default;

void Outlet::serve(const std::shared_ptr<WriteState>& job) {
    std::optional<Error> error;
    {
        const std::scoped_lock lock(mutex_);
        job_ = job;
        serves_ = true;
        left_ = job->plan().extents().size();
        error = error_;
    }
    changed_.notify_all();
    if (error) job->fail(*error);
}

void Outlet::put(std::unique_ptr<CapturedExtent>& extent) {
    {
        const std::scoped_lock lock(mutex_);
        if (!dropped_) extents_.push_back(std::move(extent));
    }
    changed_.notify_all();
    if (extent) retire(std::move(extent));
}

void Outlet::end(std::span<const std::byte> tail) {
    {
        const std::scoped_lock lock(mutex_);
        if (!tail_ && !ended_) tail_.emplace(tail.begin(), tail.end());
    }
    changed_.notify_all();
}

void Outlet::drop() {
    std::deque<std::unique_ptr<CapturedExtent>> left;
    {
        const std::scoped_lock lock(mutex_);
        dropped_ = true;
        left.swap(extents_);
    }
    changed_.notify_all();
    for (auto& extent : left) retire(std::move(extent));
}

bool Outlet::take(Deadline deadline, std::unique_ptr<HandedBytes>& next) {
    std::unique_lock lock(mutex_);
    if (!wait_until(changed_, lock, deadline, [&] { return next_is_known(); })) return false;
    if (dropped_) throw Error::cancelled();
    if (!extents_.empty()) {
        next = std::make_unique<HandedBytes>(shared_from_this(), extents_.front());
        extents_.pop_front();
        --left_;
    } else if (auto tail = std::exchange(tail_, std::nullopt)) {
        next = std::make_unique<HandedBytes>(shared_from_this(), std::move(*tail));
        ended_ = true;
    } else {
        next.reset();
    }
    return true;
}

std::shared_ptr<WriteState> Outlet::served() {
    const std::scoped_lock lock(mutex_);
    return job_.lock();
}

void Outlet::finish() {
    bool whole = false;
    {
        const std::scoped_lock lock(mutex_);
        whole = serves_ && left_ == 0 && ended_;
    }
    if (!whole) {
        fail({ErrorCode::io, 0, "write", name_, "write " + name_ + ": not all of it was taken"});
    } else if (const auto job = served()) {
        job->end_handing();
    }
}

void Outlet::fail(const Error& error) {
    {
        const std::scoped_lock lock(mutex_);
        error_ = error;
    }
    if (const auto job = served()) job->fail(error);
}

}  // namespace datastates
