#include "datastates/reservation.hpp"

#include <algorithm>

#include "datastates/error.hpp"
#include "datastates/file.hpp"

namespace datastates {

bool Reservation::ensure(const File& file, std::uint64_t end) {
    std::unique_lock lock(mutex_);
    while (reserved_ < end) {
        // Just what is needed comes first: it must not fail for want of what lies further on.
        if (reserving_) {
            changed_.wait(lock);
        } else if (!advance(lock, file, end)) {
            return false;
        }
    }
    if (ahead_ && !reserving_ && reserved_ < length_ && reserved_ - end < step_) {
        reserve_ahead(lock, file);
    }
    return true;
}

void Reservation::reserve_ahead(std::unique_lock<std::mutex>& lock, const File& file) {
    try {
        ahead_ = advance(lock, file, reserved_ + std::min(step_, length_ - reserved_));
    } catch (const Error&) {
        // Nobody needs it yet; those who will, ask for it themselves and are told. A failed try may
        // have cost as much as a good one, so there is no other.
        ahead_ = false;
    }
}

/// Holds `lock` again when it returns or throws.
bool Reservation::advance(std::unique_lock<std::mutex>& lock, const File& file, std::uint64_t end) {
    class Turn {
      public:
        Turn(Reservation& owner, std::unique_lock<std::mutex>& lock) : owner_(owner), lock_(lock) {
            owner_.reserving_ = true;
            lock_.unlock();
        }
        ~Turn() {
            lock_.lock();
            owner_.reserving_ = false;
            owner_.changed_.notify_all();
        }
        Turn(const Turn&) = delete;
        Turn& operator=(const Turn&) = delete;
        Turn(Turn&&) = delete;
        Turn& operator=(Turn&&) = delete;

      private:
        Reservation& owner_;
        std::unique_lock<std::mutex>& lock_;
    };
    const std::uint64_t begin = reserved_;
    bool reserved = false;
    {
        const Turn turn(*this, lock);
        reserved = file.allocate(begin, end - begin);
    }
    if (reserved) reserved_ = end;
    return reserved;
}

}  // namespace datastates
