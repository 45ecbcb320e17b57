#pragma once

#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "datastates/base/error.hpp"
#include "datastates/base/timeline.hpp"
#include "datastates/io/file.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/plan.hpp"
#include "datastates/read/shelf.hpp"

namespace datastates {

struct ReadStats {
    std::uint64_t bytes_needed = 0;
    std::uint64_t bytes_read = 0;
    std::uint64_t in_place_bytes = 0;  // read straight into their destination
    std::uint64_t cached_bytes = 0;    // needed ones that were in the page cache or in memory
    double seconds = 0;                // from submit_read to the end
    bool direct = false;
};

/// What the reader thread and a read's owner share.
class ReadState {
  public:
    ReadState(File file, std::shared_ptr<const ReadPlan> plan, Buffers buffers);

    const ReadPlan& plan() const { return *plan_; }
    const Buffers& buffers() const { return buffers_; }
    File& file() { return file_; }
    bool memory_backed() const { return file_.memory_backed(); }
    const std::string& path() const { return file_.path(); }

    // Set up by submit, in the caller's thread.
    void add_engine(int device, std::shared_ptr<CopyEngine> engine);
    void add_producer(int device, std::shared_ptr<Event> event);
    /// Its extents are not to go anywhere yet; what is cached is left to whoever knows where.
    void fill(std::shared_ptr<Shelf> shelf) { filled_ = std::move(shelf); }
    /// What is there need not be read again.
    void use(std::shared_ptr<Shelf> shelf) { used_ = std::move(shelf); }

    // The reader's and its workers'.
    CopyEngine& engine(int device) const { return *engines_.at(device); }
    Shelf* filled() const { return filled_.get(); }
    Shelf* used() const { return used_.get(); }
    /// Whether an extent is still to be begun: of several failures the first is reported, whatever
    /// was begun first.
    bool wants(std::size_t extent) const {
        return !settled(extent) && !(filled_ && filled_->closed());
    }
    /// Lets our streams wait for what the destinations' streams were doing.
    void order_after_producers();
    /// Nothing new is started after it; of several errors the one of the lowest `extent` stays.
    void fail(std::size_t extent, const Error& error);
    /// Whether nothing that is found in `extent` would change the outcome.
    bool settled(std::size_t extent) const;
    Timeline& timeline() { return timeline_; }
    const Timeline& timeline() const { return timeline_; }
    void finish(ReadStats stats);

    // The owner's.
    void stop();
    bool stopped() const { return stopped_.load(std::memory_order_acquire); }
    /// Throws what the read failed with; false when the deadline passed.
    bool wait(std::optional<Clock::time_point> deadline) const;
    void wait_done() const;
    bool done() const;
    ReadStats stats() const;

  private:
    const std::shared_ptr<const ReadPlan> plan_;
    const Buffers buffers_;
    File file_;
    const Clock::time_point start_ = Clock::now();
    std::map<int, std::shared_ptr<CopyEngine>> engines_;
    std::vector<std::pair<int, std::shared_ptr<Event>>> producers_;
    std::shared_ptr<Shelf> filled_;
    std::shared_ptr<Shelf> used_;
    std::atomic<bool> stopped_ = false;

    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    bool done_ = false;
    std::optional<Error> error_;
    std::size_t error_extent_ = 0;
    ReadStats stats_;
    Timeline timeline_;
};

}  // namespace datastates
