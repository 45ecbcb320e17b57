#include "datastates/reader.hpp"

#include <algorithm>
#include <set>
#include <utility>

#include "datastates/background.hpp"
#include "datastates/error.hpp"
#include "datastates/extent_read.hpp"

namespace datastates {
namespace {

constexpr std::uint64_t kPage = 4096;
// Below this a direct read of its own costs more than a copy out of a block.
constexpr std::uint64_t kInPlaceMinimum = std::uint64_t{64} << 10;
// A read is widened to whole pages, so that it can go past the page cache, where that adds no more
// than one byte for so many.
constexpr std::uint64_t kWidening = 64;

}  // namespace

Reader::Reader(HostCache& cache, WorkerPool& workers, std::unique_ptr<IoBackend> backend,
               unsigned queue_depth)
    : cache_(cache),
      workers_(workers),
      backend_(std::move(backend)),
      queue_depth_(queue_depth),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

void Reader::enqueue(std::shared_ptr<ReadState> job) {
    {
        const std::scoped_lock lock(mutex_);
        queue_.push_back(std::move(job));
    }
    queued_.notify_one();
}

void Reader::run(const std::stop_token& stop) {
    work_in_background();
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
        job->finish(stats_);
    }
}

/// Runs one job to its end, failed or not: nothing is in flight after it.
void Reader::read(ReadState& job) {
    std::size_t next = 0;
    try {
        if (!job.stopped()) job.order_after_producers();
    } catch (...) {
        job.fail(0, Error::current());
    }
    for (;;) {
        try {
            while (!job.stopped() && next < job.plan().extents().size() && has_room()) {
                if (!start_next(job, next)) break;
                ++next;
            }
        } catch (...) {
            job.fail(next, Error::current());
        }
        if (backend_->in_flight() > 0) {
            reap(job);
            take_worked(job, false);
            release_copied(job, false);
        } else if (working_ > 0) {
            take_worked(job, true);
            release_copied(job, false);
        } else if (!copying_.empty()) {
            release_copied(job, true);
        } else if (job.stopped() || next == job.plan().extents().size()) {
            return;
        }
    }
}

/// Enough is under way to keep the device and the workers busy, and no more: what is queued has to
/// be waited for when the job is stopped.
bool Reader::has_room() const {
    return in_flight_.size() < queue_depth_ &&
           working_ < queue_depth_ + (std::size_t{2} * workers_.size());
}

/// False when there is no block, and waiting for one would keep us from our own completions.
bool Reader::start_next(ReadState& job, std::size_t index) {
    const ReadPlan::Extent& extent = job.plan().extents()[index];
    const bool cached = job.file().cached(extent.offset, extent.length);
    const auto reading = std::make_shared<Reading>(Reading{.index = index,
                                                           .block = std::nullopt,
                                                           .data = in_place(job, extent, cached),
                                                           .track = 0,
                                                           .begin = {}});
    if (reading->data != nullptr) {
        stats_.in_place_bytes += extent.length;
    } else {
        reading->block = cache_.try_acquire();
        if (!reading->block) {
            if (!in_flight_.empty() || working_ > 0 || !copying_.empty()) return false;
            reading->block = cache_.acquire([&] { return job.stopped(); });
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

/// Where an extent can be read to without a block between, or null.
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

/// Past the page cache where that is possible.
void Reader::start_direct(ReadState& job, const std::shared_ptr<Reading>& reading) {
    const ReadPlan::Extent& extent = job.plan().extents()[reading->index];
    const File& file = job.file();
    if (!reading->block) {
        const std::uint64_t whole =
            file.direct() ? extent.length / file.offset_alignment() * file.offset_alignment()
                          : extent.length;
        const std::uint64_t rest = extent.length - whole;
        // The rest is less than a page: through the page cache, straight to its place.
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
    in_flight_.emplace(request.token, Part{.reading = reading, .request = request});
    backend_->submit(request);
}

/// Waits for the backend, or for a worker that is through.
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
        stats_.bytes_read += completion.transferred;
        try {
            if (!completion.ok()) throw io_error(completion, part.request);
        } catch (...) {
            job.fail(reading->index, Error::current());
        }
        if (--reading->parts > 0) continue;
        job.timeline().add(Stage::read, reading->track, reading->begin,
                           job.plan().extents()[reading->index].length);
        start_work(job, reading, false);
    }
}

void Reader::start_work(ReadState& job, std::shared_ptr<Reading> reading, bool through_cache) {
    ++working_;
    workers_.submit(WorkerPool::Task(
        [this, &job, through_cache, reading = std::move(reading)](unsigned worker) mutable {
            try {
                work(job, *reading, through_cache, worker);
            } catch (...) {
                job.fail(reading->index, Error::current());
            }
            // Locked to the end: the job may be over as soon as it is open.
            const std::scoped_lock lock(mutex_);
            worked_.push_back(std::move(reading));
            work_done_.notify_one();
            backend_->wake();
        }));
}

/// In a worker: brings an extent's bytes in, if need be, verifies them, and puts them in place as
/// far as the host is concerned.
void Reader::work(ReadState& job, Reading& reading, bool through_cache, unsigned worker) {
    // Extents before a failed one still count: the first of several failures is the one reported.
    if (job.settled(reading.index)) return;
    const ReadPlan::Extent& extent = job.plan().extents()[reading.index];
    reading.cached_bytes = finish_extent(job, extent, reading.data,
                                         {.through_cache = through_cache,
                                          .in_place = !reading.block,
                                          .track = reading.track,
                                          .worker = worker});
}

/// Goes on with the extents that workers are through with.
void Reader::take_worked(ReadState& job, bool wait) {
    std::unique_lock lock(mutex_);
    if (wait) work_done_.wait(lock, [&] { return !worked_.empty(); });
    const std::vector<std::shared_ptr<Reading>> worked = std::exchange(worked_, {});
    lock.unlock();
    working_ -= worked.size();
    for (const auto& reading : worked) {
        stats_.bytes_read += reading->cached_bytes;
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

/// Returns the blocks whose copies are through; with `wait`, all of the oldest one's first.
void Reader::release_copied(ReadState& job, bool wait) {
    while (!copying_.empty()) {
        const Copying& oldest = copying_.front();
        try {
            for (const auto& event : oldest.events) {
                if (wait) event->synchronize();
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
