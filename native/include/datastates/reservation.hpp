#pragma once

#include <condition_variable>
#include <cstdint>
#include <mutex>

namespace datastates {

class File;

/// Space for a file that many threads fill at once. It is reserved from the file's start on, by one
/// of them at a time and ahead of the others, who go on meanwhile. Thread-safe.
class Reservation {
  public:
    /// For a file of `length` bytes, which is reserved `step` bytes ahead.
    Reservation(std::uint64_t length, std::uint64_t step) : length_(length), step_(step) {}

    /// Returns when all before `end`, at most `length`, is reserved; false where the file system
    /// reserves nothing. Throws Error "io" where it is too full for that; not for want of what lies
    /// further on.
    bool ensure(const File& file, std::uint64_t end);

  private:
    bool advance(std::unique_lock<std::mutex>& lock, const File& file, std::uint64_t end);
    void reserve_ahead(std::unique_lock<std::mutex>& lock, const File& file);

    const std::uint64_t length_;
    const std::uint64_t step_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::uint64_t reserved_ = 0;
    bool reserving_ = false;
    bool ahead_ = true;
};

}  // namespace datastates
