#include "datastates/read/reader.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/base/thread.hpp"
#include "datastates/read/extent_read.hpp"

namespace datastates {
namespace {

constexpr std::uint64_t kPage = 4096;
// Below this, a direct read in place costs more than a copy from a block.
constexpr std::uint64_t kInPlaceMinimum = std::uint64_t{64} << 10;
// A read is widened to whole pages, for direct I/O, if that adds at most one byte to this many.
constexpr std::uint64_t kWidening = 64;

}  // namespace

Reader::Reader(HostCache& cache, WorkerPool& workers, std::unique_ptr<IoBackend> backend,
               unsigned queue_depth)
    : cache_(cache),
      workers_(workers),
      backend_(std::move(backend)),
      queue_depth_(queue_depth),
      thread_(start_thread("ds-reader", [this](const std::stop_token& stop) { run(stop); })) {}

void Reader::enqueue(const std::shared_ptr<ReadState>& job) {
    try {
        const std::scoped_lock lock(mutex_);
        queue_.push_back(job);
    } catch (...) {
        job->finish({});  // so that its owner does not wait for ever
        throw;
    }
    queued_.notify_one();
}

void Reader::look_again() { backend_->wake(); }

void Reader::run(const std::stop_token& stop) {
    for (;;) {
        std::unique_lock lock(mutex_);
        if (!queued_.wait(lock, stop, [&] { return !queue_.empty(); })) return;
        const std::shared_ptr<ReadState> job = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        stats_ = {};
        tracks_ = {};
        read(*job);
        stats_.direct = job->file().direct();
        if (in_flight_.empty()) {
            job->finish(stats_);
        } else {
            leaving_ = job;
        }
    }
}

bool Reader::withdraw(const ReadState& job) {
    std::shared_ptr<ReadState> found;
    {
        const std::scoped_lock lock(mutex_);
        const auto at = std::ranges::find(queue_, &job, &std::shared_ptr<ReadState>::get);
        if (at == queue_.end()) return false;
        found = std::move(*at);
        queue_.erase(at);
    }
    found->finish({});
    return true;
}

/// Runs one job to its end, failed or not. Afterwards nothing is in flight, except reads of a
/// read-ahead that the next job takes over.
void Reader::read(ReadState& job) {
    std::size_t next = 0;
    try {
        taken_.clear();
        if (!job.stopped()) job.order_after_producers();
        if (job.used() != nullptr) take_over(job, *job.used());
    } catch (...) {
        job.fail(0, Error::current());
    }
    for (;;) {
        try {
            while (next < job.plan().extents().size() && job.wants(next) && has_room()) {
                if (!start_next(job, next)) break;
                ++next;
            }
        } catch (...) {
            job.fail(next, Error::current());
        }
        if (!in_flight_.empty() && is_taken_over(job)) return;
        if (backend_->in_flight() > 0) {
            reap(job);
            take_worked(job, false);
            release_copied(job, false);
        } else if (working_ > 0) {
            take_worked(job, true);
            release_copied(job, false);
        } else if (!copying_.empty()) {
            release_copied(job, true);
        } else if (!job.wants(next) || next == job.plan().extents().size()) {
            return;
        }
    }
}

/// Whether to begin another extent. The limit suffices to keep the device, the workers and the
/// copies busy. It is not higher, because a stopped job waits for all that has begun, and because
/// few blocks mostly stay in the processor's caches, from which a GPU then reads them.
bool Reader::has_room() const {
    return in_flight_.size() < queue_depth_ &&
           working_ + copying_.size() < queue_depth_ + workers_.size() + working_kept_;
}

/// Whether `job` is a read-ahead and the next job takes over its extents.
bool Reader::is_taken_over(const ReadState& job) {
    if (job.filled() == nullptr || !job.filled()->closed()) return false;
    const std::scoped_lock lock(mutex_);
    return !queue_.empty() && queue_.front()->used() == job.filled();
}

/// Takes over a read-ahead. Extents that are read go to the workers all at once, as they have their
/// blocks already. Reads in flight go on as this job's own. Extents that it does not want are
/// dropped.
void Reader::take_over(ReadState& job, ExtentsAhead& extents_ahead) {
    stats_.bytes_read += extents_ahead.take_bytes_read();
    const auto extents = job.plan().extents();
    for (std::size_t index = 0; index < extents.size() && !job.settled(index); ++index) {
        auto kept = extents_ahead.take(extents[index]);
        if (!kept) continue;
        taken_.insert(index);
        ++working_kept_;
        start_work(job,
                   std::make_shared<Reading>(Reading{.owner = &job,
                                                     .index = index,
                                                     .block = std::move(kept->block),
                                                     .data = kept->data,
                                                     .track = tracks_.take(),
                                                     .begin = Clock::now(),
                                                     .kept = true}),
                   false);
    }
    extents_ahead.clear();
    if (leaving_ == nullptr || leaving_->filled() != &extents_ahead) return;
    for (auto& [token, part] : in_flight_) {
        Reading& reading = *part.reading;
        const ReadPlan::Extent& extent = leaving_->plan().extents()[reading.index];
        const auto same =
            std::ranges::lower_bound(extents, extent.offset, {}, &ReadPlan::Extent::offset);
        if (same == extents.end() || same->offset != extent.offset || same->length != extent.length)
            continue;
        reading.owner = &job;
        reading.index = static_cast<std::size_t>(same - extents.begin());
        reading.track = tracks_.take();
        taken_.insert(reading.index);
    }
}

/// Begins an extent. False when there is no block now: the thread must first reap completions, or
/// the extent is not wanted any more.
bool Reader::start_next(ReadState& job, std::size_t index) {
    if (taken_.contains(index)) return true;
    const ReadPlan::Extent& extent = job.plan().extents()[index];
    const bool cached = job.file().cached(extent.offset, extent.length);
    if (job.filled() != nullptr && (cached || extent.sparse())) return true;
    const auto reading = std::make_shared<Reading>(Reading{.owner = &job,
                                                           .index = index,
                                                           .block = std::nullopt,
                                                           .data = in_place(job, extent, cached),
                                                           .track = 0,
                                                           .begin = {}});
    if (reading->data != nullptr) {
        stats_.in_place_bytes += extent.length;
    } else {
        reading->block = cache_.try_acquire();
        if (!reading->block && job.filled() != nullptr) {
            job.filled()->close();  // a read-ahead does not wait for blocks
            return false;
        }
        if (!reading->block) {
            if (!in_flight_.empty() || working_ > 0 || !copying_.empty()) return false;
            reading->block = cache_.acquire([&] { return !job.wants(index); });
            if (!reading->block) return false;
        }
        reading->data = reading->block->memory().data();
    }
    reading->track = tracks_.take();
    reading->begin = Clock::now();
    if (cached) stats_.cached_bytes += extent.bytes;
    if (extent.sparse() && !cached) job.file().will_need(extent.offset, extent.length);
    if (extent.sparse() || cached) {
        start_work(job, reading, true);
    } else {
        start_direct(job, reading);
    }
    return true;
}

/// Where to read an extent directly into its destination; null if it needs a block.
std::byte* Reader::in_place(ReadState& job, const ReadPlan::Extent& extent, bool cached) {
    const auto pieces = job.plan().pieces(extent);
    if (pieces.size() != 1 || extent.sparse()) return nullptr;
    const ReadPlan::Piece& piece = pieces.front();
    const auto dest = static_cast<std::size_t>(piece.dest);
    if (job.buffers().device[dest] >= 0 || piece.length != extent.length) return nullptr;
    auto* const to = reinterpret_cast<std::byte*>(job.buffers().address[dest] + piece.dest_offset);
    const File& file = job.file();
    if (cached || !file.direct()) return to;
    const bool fits = extent.length >= kInPlaceMinimum &&
                      file.fits_direct(to, file.offset_alignment(), extent.offset);
    return fits ? to : nullptr;
}

/// Submits an extent's reads to the backend, by direct I/O where that is possible.
void Reader::start_direct(ReadState& job, const std::shared_ptr<Reading>& reading) {
    const ReadPlan::Extent& extent = job.plan().extents()[reading->index];
    const File& file = job.file();
    if (!reading->block) {
        const std::uint64_t whole =
            file.direct() ? extent.length / file.offset_alignment() * file.offset_alignment()
                          : extent.length;
        const std::uint64_t rest = extent.length - whole;
        // The rest is less than a page and is read through the page cache.
        reading->parts = rest == 0 ? 1 : 2;
        submit(job, reading, reading->data, extent.offset, whole, whole);
        if (rest != 0)
            submit(job, reading, reading->data + whole, extent.offset + whole, rest, rest);
        return;
    }
    std::uint64_t begin = extent.offset / kPage * kPage;
    std::uint64_t end = (extent.offset + extent.length + kPage - 1) / kPage * kPage;
    if (!file.direct() || file.offset_alignment() > kPage ||
        (end - begin - extent.length) * kWidening > extent.length) {
        begin = extent.offset;
        end = extent.offset + extent.length;
    }
    std::byte* const memory = reading->data;
    reading->data = memory + (extent.offset - begin);
    reading->parts = 1;
    submit(job, reading, memory, begin, end - begin, extent.offset + extent.length - begin);
}

void Reader::submit(ReadState& job, const std::shared_ptr<Reading>& reading, std::byte* buffer,
                    std::uint64_t offset, std::size_t length, std::size_t required) {
    const IoRequest request{.kind = IoKind::read,
                            .file = &job.file(),
                            .buffer = buffer,
                            .length = length,
                            .required = required,
                            .offset = offset,
                            .token = next_token_++};
    const auto part = in_flight_.try_emplace(request.token).first;
    part->second = {.reading = reading, .request = request};
    try {
        backend_->submit(request);
    } catch (...) {
        in_flight_.erase(part);
        throw;
    }
}

/// Waits for completions, or until a worker or another thread wakes the backend.
void Reader::reap(ReadState& job) {
    std::vector<IoCompletion> completions;
    try {
        completions = backend_->reap(true);
    } catch (...) {
        job.fail(0, Error::current());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
    }
    for (const IoCompletion& completion : completions) {
        const auto found = in_flight_.find(completion.token);
        Part part = std::move(found->second);
        in_flight_.erase(found);
        const std::shared_ptr<Reading> reading = std::move(part.reading);
        ReadState& owner = *reading->owner;
        reading->bytes_read += completion.transferred;
        try {
            if (!completion.ok()) throw io_error(completion, part.request);
        } catch (...) {
            owner.fail(reading->index, Error::current());
        }
        if (--reading->parts > 0) continue;
        if (&owner != &job) {  // read ahead, but not wanted
            stats_.bytes_read += reading->bytes_read;
        } else if (job.filled() != nullptr) {
            keep(job, *reading);
        } else {
            job.timeline().add(Stage::read, reading->track, reading->begin,
                               job.plan().extents()[reading->index].length);
            try {
                start_work(job, reading, false);
            } catch (...) {
                job.fail(reading->index, Error::current());
            }
        }
    }
    if (leaving_ != nullptr && std::ranges::none_of(in_flight_, [&](const auto& flying) {
            return flying.second.request.file == &leaving_->file();
        })) {
        std::exchange(leaving_, nullptr)->finish({});
    }
}

/// Puts an extent of a read-ahead with the others.
void Reader::keep(ReadState& job, Reading& reading) {
    tracks_.give_back(reading.track);
    try {
        job.filled()->count(reading.bytes_read);
        // Drop failed extents: the job that takes over reads them again and reports the error.
        if (job.stopped() || !reading.block) return;
        job.filled()->put(job.plan().extents()[reading.index],
                          {.block = std::move(*reading.block), .data = reading.data});
    } catch (...) {
        job.fail(reading.index, Error::current());
    }
}

void Reader::start_work(ReadState& job, std::shared_ptr<Reading> reading, bool through_cache) {
    std::list<std::shared_ptr<Reading>> worked;  // allocated here, where an error can be thrown
    worked.push_back(std::move(reading));
    workers_.submit(WorkerPool::Task(
        [this, &job, through_cache, worked = std::move(worked)](unsigned worker) mutable {
            Reading& reading = *worked.front();
            try {
                work(job, reading, through_cache, worker);
            } catch (...) {
                job.fail(reading.index, Error::current());
            }
            // Keep the lock to the end: the job may be gone once it is released.
            const std::scoped_lock lock(mutex_);
            worked_.splice(worked_.end(), worked);
            work_done_.notify_one();
            backend_->wake();
        }));
    ++working_;
}

/// In a worker: reads an extent if necessary, verifies it, and fills its host destinations.
void Reader::work(ReadState& job, Reading& reading, bool through_cache, unsigned worker) {
    // Extents before a failed one still count: the failure of the lowest extent is reported.
    if (job.settled(reading.index)) return;
    const ReadPlan::Extent& extent = job.plan().extents()[reading.index];
    reading.bytes_read += finish_extent(job, extent, reading.data,
                                        {.through_cache = through_cache,
                                         .in_place = !reading.block,
                                         .track = reading.track,
                                         .worker = worker});
}

/// Takes extents that workers have finished, and starts their copies to devices.
void Reader::take_worked(ReadState& job, bool wait) {
    std::unique_lock lock(mutex_);
    if (wait) work_done_.wait(lock, [&] { return !worked_.empty(); });
    const std::list<std::shared_ptr<Reading>> worked = std::exchange(worked_, {});
    lock.unlock();
    working_ -= worked.size();
    for (const auto& reading : worked) {
        if (reading->kept) --working_kept_;
        stats_.bytes_read += reading->bytes_read;
        try {
            if (reading->block && !job.settled(reading->index)) copy_to_devices(job, reading);
        } catch (...) {
            job.fail(reading->index, Error::current());
        }
        const bool copying = !copying_.empty() && copying_.back().reading == reading;
        if (!copying) tracks_.give_back(reading->track);
    }
}

void Reader::copy_to_devices(ReadState& job, const std::shared_ptr<Reading>& reading) {
    const ReadPlan::Extent& extent = job.plan().extents()[reading->index];
    std::set<int> devices;
    Copying copying{.reading = reading, .begin = Clock::now(), .bytes = 0, .events = {}};
    try {
        for (const ReadPlan::Piece& piece : job.plan().pieces(extent)) {
            const auto dest = static_cast<std::size_t>(piece.dest);
            const int device = job.buffers().device[dest];
            if (piece.length == 0 || device < 0) continue;
            const CopyEngine& engine = job.engine(device);
            devices.insert(device);
            engine.to_device(job.buffers().address[dest] + piece.dest_offset,
                             reading->data + piece.extent_offset, piece.length,
                             engine.restore_stream());
            copying.bytes += piece.length;
        }
        for (const int device : devices) {
            const CopyEngine& engine = job.engine(device);
            copying.events.push_back(engine.record(engine.restore_stream()));
        }
    } catch (...) {
        for (const int device : devices) {
            job.engine(device).drain(job.engine(device).restore_stream());
        }
        throw;
    }
    if (!copying.events.empty()) copying_.push_back(std::move(copying));
}

/// Gives back the blocks whose copies have finished. With `wait`, waits for the oldest one first.
void Reader::release_copied(ReadState& job, bool wait) {
    while (!copying_.empty()) {
        const Copying& oldest = copying_.front();
        try {
            for (const auto& event : oldest.events) {
                if (wait && !event->synchronize()) throw cuda::capture_lasts();
                if (!event->passed()) return;
            }
        } catch (...) {
            job.fail(0, Error::current());
        }
        job.timeline().add(Stage::copy, oldest.reading->track, oldest.begin, oldest.bytes);
        tracks_.give_back(oldest.reading->track);
        copying_.pop_front();
        wait = false;
    }
}

}  // namespace datastates
