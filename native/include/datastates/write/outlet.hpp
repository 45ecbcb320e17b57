#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "datastates/base/deadline.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/timeline.hpp"
#include "datastates/base/unmovable.hpp"

namespace datastates {

class Outlet;
class WriteState;
struct CapturedExtent;

/// Bytes of a file that are handed over: an extent in its block, or the file's end. Gives the block
/// back when it is destroyed, in any thread.
class HandedBytes : Unmovable {
  public:
    /// Takes the extent, unless this throws. REQUIRES: the outlet's mutex is held.
    HandedBytes(std::shared_ptr<Outlet> outlet, std::unique_ptr<CapturedExtent>& extent);
    HandedBytes(std::shared_ptr<Outlet> outlet, std::vector<std::byte> tail);
    ~HandedBytes();

    std::span<std::byte> bytes() const { return bytes_; }

  private:
    const std::shared_ptr<Outlet> outlet_;
    const std::uint32_t track_ = 0;
    std::unique_ptr<CapturedExtent> extent_;
    std::vector<std::byte> tail_;
    std::span<std::byte> bytes_;
    Clock::time_point begin_ = Clock::now();
};

/// Hands the bytes of one job's file, in their order, to whoever makes an object of them, as an
/// upload does. The job puts, the other side takes. Thread-safe.
class Outlet : public std::enable_shared_from_this<Outlet>, Unmovable {
  public:
    /// `name` of the object, for errors.
    explicit Outlet(std::string name);
    ~Outlet();

    const std::string& name() const { return name_; }

    // For the job.
    /// Serves this job from now on; fails it if the other side has failed already. Call it once,
    /// before put().
    void serve(const std::shared_ptr<WriteState>& job);
    /// Takes the extent, unless this throws. After drop() it is retired at once.
    void put(std::unique_ptr<CapturedExtent>& extent);
    /// The file ends with `tail`, behind the last extent. Later calls do nothing.
    void end(std::span<const std::byte> tail);
    /// Retires what is not taken yet. take() then throws.
    void drop();

    // For the other side.
    /// The next bytes, or null at the end. False when the deadline passes first. Throws Error
    /// "cancelled" once the job has failed.
    bool take(Deadline deadline, std::unique_ptr<HandedBytes>& next);
    /// The object is made: the job's file is written once all that was taken is given back. If not
    /// all was taken, the job fails.
    void finish();
    /// The object cannot be made: the job fails.
    void fail(const Error& error);

  private:
    friend class HandedBytes;
    std::shared_ptr<WriteState> served();
    bool next_is_known() const {
        return dropped_ || !extents_.empty() || (serves_ && left_ == 0 && (tail_ || ended_));
    }

    const std::string name_;
    std::mutex mutex_;
    std::condition_variable changed_;
    std::weak_ptr<WriteState> job_;
    bool serves_ = false;
    std::size_t left_ = 0;  // extents that are not taken yet
    std::deque<std::unique_ptr<CapturedExtent>> extents_;
    std::optional<std::vector<std::byte>> tail_;
    std::optional<Error> error_;
    bool ended_ = false;  // the tail is taken
    bool dropped_ = false;
    Tracks tracks_;
};

}  // namespace datastates
