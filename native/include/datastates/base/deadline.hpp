#pragma once

#include <condition_variable>
#include <mutex>
#include <optional>

#include "datastates/base/timeline.hpp"

namespace datastates {

/// When to stop waiting; empty: never.
using Deadline = std::optional<Clock::time_point>;

/// Waits until `done()`; false when the deadline passes first.
template <typename Done>
bool wait_until(std::condition_variable& changed, std::unique_lock<std::mutex>& lock,
                Deadline deadline, Done done) {
    if (deadline) return changed.wait_until(lock, *deadline, done);
    changed.wait(lock, done);
    return true;
}

}  // namespace datastates
