#include "datastates/read/reader.hpp"

#include <algorithm>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/base/page.hpp"
#include "datastates/base/thread.hpp"
#include "datastates/read/extent_place.hpp"
#include "datastates/read/extent_read.hpp"
#include "datastates/read/extent_steps.hpp"

namespace datastates {

Reader::Reader(HostCache& cache, WorkerPool& workers, std::unique_ptr<IoBackend> backend,
               unsigned queue_depth)
    : cache_(cache),
      workers_(workers),
      backend_(std::move(backend)),
      queue_depth_(queue_depth),
      inbox_(*backend_),
      reads_(*backend_),
      thread_(start_thread("ds-reader", [this](const std::stop_token& stop) { run(stop); })) {
    cache_.watch(this, [this] { inbox_.look_again(); });
}

Reader::~Reader() { cache_.watch(this, {}); }

void Reader::enqueue(const std::shared_ptr<ReadState>& job) {
    try {
        ReadRuns made;
        made.push_back({.job = job, .streams = Streams(workers_.size())});
        inbox_.put(made);
    } catch (...) {
        job->finish({});  // so that its owner does not wait for ever
        throw;
    }
}

void Reader::run(const std::stop_token& stop) {
    while (wait_for_jobs(stop)) {
        begin_extents();
        wait();
        if (windows_.use_count() == 1) windows_.reset();  // nobody uses its windows any more
        finish_jobs();
    }
}

/// Waits until there is a job, begun or queued. False when the thread has to end.
bool Reader::wait_for_jobs(const std::stop_token& stop) {
    if (!runs_.empty()) return true;
    tracks_ = {};
    hurry_.reset();
    if (!inbox_.wait_for_job(stop)) return false;
    hurry_.emplace(cache_);
    return true;
}

/// Begins extents, and jobs, while there is room.
void Reader::begin_extents() {
    lacks_room_ = true;
    while (has_room()) {
        if (may_begin_job()) {
            lacks_room_ = begin_job();
            if (!lacks_room_) return;
            continue;
        }
        ReadRun& run = runs_.back();
        try {
            if (!start_next(run)) return;
            ++run.next;
        } catch (...) {
            run.job->fail(run.next, Error::current());
        }
    }
}

/// Begins the next job; false if none is queued.
bool Reader::begin_job() {
    ReadRuns next = inbox_.take_job();
    if (next.empty()) return false;
    runs_.splice(runs_.end(), next);
    ReadRun& run = runs_.back();
    ReadState& job = *run.job;
    try {
        if (!job.stopped()) job.devices().order_after_producers(&CopyEngine::restore_stream);
    } catch (...) {
        job.fail(0, Error::current());
    }
    return true;
}

/// Whether to begin another extent. The limit suffices to keep the device, the workers and the
/// copies busy. It is not higher, because a stopped job waits for all that has begun, and because
/// few blocks mostly stay in the processor's caches, from which a GPU then reads them.
bool Reader::has_room() const {
    return reads_.size() < queue_depth_ &&
           working_ + copying_.size() < queue_depth_ + workers_.size();
}

bool Reader::may_begin_job() const { return has_room() && (runs_.empty() || runs_.back().begun()); }

/// Begins a job's next extent. False when there is no block or stream now: the thread must first
/// wait for something to end, or the extent is not wanted any more.
bool Reader::start_next(ReadRun& run) {
    ReadState& job = *run.job;
    const ReadPlan::Extent& extent = job.plan().extents()[run.next];
    DescriptorFile* const file = job.file().descriptor();
    const bool cached = job.file().cached(extent.offset, extent.length);
    const bool through_cache = file != nullptr && (cached || extent.through_cache());
    const bool streamed = through_cache && extent.shared && !cached;
    const auto reading = std::make_shared<Reading>(Reading{.run = &run,
                                                           .index = run.next,
                                                           .block = nullptr,
                                                           .data = nullptr,
                                                           .track = 0,
                                                           .begin = {}});
    // Few at a time: the kernel reads ahead, in large pages, only for who reads in order.
    if (through_cache) reading->from = streamed ? run.streams.take(*file) : file;
    reading->streamed = streamed;
    if (streamed && reading->from == nullptr) return false;
    reading->data = memory_for(run, *reading, cached, through_cache);
    if (reading->data == nullptr) {
        if (streamed) run.streams.give_back(reading->from);
        return false;
    }
    reading->track = tracks_.take();
    reading->begin = Clock::now();
    if (cached) run.stats.cached_bytes += extent.bytes;
    if (through_cache) {
        if (!cached && !streamed) file->will_need(extent.offset, extent.length);
        start_work(reading);
    } else {
        reads_.start(reading);
    }
    return true;
}

/// The memory to read an extent into: its destination, a block, or a window in a block that others
/// share. `reading` then holds the block. Null when there is no block now.
std::byte* Reader::memory_for(ReadRun& run, Reading& reading, bool cached, bool through_cache) {
    ReadState& job = *run.job;
    if (std::byte* const dest = in_place(job, job.file(), reading.extent(), cached)) {
        run.stats.in_place_bytes += reading.extent().length;
        return dest;
    }
    const std::size_t whole = cache_.block_bytes();
    std::size_t bytes = whole;
    if (through_cache) {
        const std::uint64_t window = window_bytes(read_steps(job, reading.extent()));
        bytes = pages_touched(0, window, page_size()) * page_size();
    }
    if (!windows_ || windows_end_ + bytes > whole) {
        reading.block = take_block(reading);
        if (!reading.block || bytes > whole / 2) {
            return reading.block ? reading.block->memory().data() : nullptr;
        }
        windows_ = reading.block;
        windows_end_ = 0;
    }
    reading.block = windows_;
    std::byte* const window = windows_->memory().data() + windows_end_;
    windows_end_ += bytes;
    return window;
}

/// Null when there is no free block now. Waits for one if nothing else is under way. Otherwise the
/// cache wakes the thread once new memory is usable.
std::shared_ptr<Block> Reader::take_block(const Reading& reading) {
    auto block = cache_.try_acquire();
    if (!block && reads_.size() == 0 && working_ == 0 && copying_.empty()) {
        windows_.reset();
        block = cache_.acquire([&] { return reading.job().settled(reading.index); });
    }
    return block ? std::make_shared<Block>(std::move(*block)) : nullptr;
}

/// Waits until something has ended, or until the thread has to look again, and goes on with it.
/// Returns at once if nothing is under way.
void Reader::wait() {
    if (backend_->in_flight() > 0) {
        reap();
        take_worked(false);
    } else if (working_ > 0) {
        take_worked(true);
    } else {
        release_copied(true);
    }
    // Asking for the copies costs a call of the driver, which is busy with the workers' copies.
    if (lacks_room_) release_copied(false);
}

/// Waits for completions, or until a worker or another thread wakes the backend.
void Reader::reap() {
    std::vector<IoCompletion> completions;
    try {
        completions = inbox_.reap(may_begin_job());
    } catch (...) {
        for (const ReadRun& run : runs_) run.job->fail(0, Error::current());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (const IoCompletion& completion : completions) {
        if (const auto reading = reads_.take(completion)) take_read(reading);
    }
}

/// Goes on with an extent that the backend has read.
void Reader::take_read(const std::shared_ptr<Reading>& reading) {
    ReadState& job = reading->job();
    job.timeline().add(Stage::read, reading->track, reading->begin, reading->extent().length);
    try {
        start_work(reading);
    } catch (...) {
        job.fail(reading->index, Error::current());
    }
}

void Reader::start_work(std::shared_ptr<Reading> reading) {
    ReadRun& run = *reading->run;
    Readings worked;  // allocated here, where an error can be thrown
    worked.push_back(std::move(reading));
    workers_.submit(WorkerPool::Task([this, worked = std::move(worked)](unsigned worker) mutable {
        Reading& reading = *worked.front();
        try {
            work(reading, worker);
        } catch (...) {
            reading.job().fail(reading.index, Error::current());
        }
        inbox_.put(worked);
    }));
    ++working_;
    ++run.under_way;
}

/// In a worker: reads an extent if necessary, verifies it, fills its host destinations and starts
/// its copies to devices.
void Reader::work(Reading& reading, unsigned worker) {
    ReadState& job = reading.job();
    // Extents before a failed one still count: the failure of the lowest extent is reported.
    if (job.settled(reading.index)) return;
    reading.finished = finish_extent(job, reading.extent(), reading.data,
                                     {.file = reading.from,
                                      .in_place = !reading.block,
                                      .track = reading.track,
                                      .worker = worker});
    reading.bytes_read += reading.finished.bytes_read;
}

/// Goes on with the extents that workers have finished. With `wait`, waits for the first one, for
/// a job that can begin, or until the thread has to look again.
void Reader::take_worked(bool wait) {
    Readings worked = inbox_.take_worked(wait, may_begin_job());
    while (!worked.empty()) {
        const Reading& reading = *worked.front();
        --working_;
        if (reading.streamed) reading.run->streams.give_back(reading.from);
        reading.run->stats.bytes_read += reading.bytes_read;
        reading.run->stats.in_place_bytes += reading.finished.in_place_bytes;
        if (reading.finished.events.empty()) {
            end(reading);
            worked.pop_front();
        } else {
            copying_.splice(copying_.end(), worked, worked.begin());
        }
    }
}

/// Ends the extents whose copies have ended. With `wait`, waits for the oldest one first.
void Reader::release_copied(bool wait) {
    for (; !copying_.empty(); copying_.pop_front()) {
        const Reading& oldest = *copying_.front();
        ReadState& job = oldest.job();
        try {
            if (!ended(oldest.finished.events, wait)) return;
        } catch (...) {
            job.fail(0, Error::current());
        }
        job.timeline().add(Stage::copy, oldest.track, oldest.finished.copies_begin,
                           oldest.finished.copied);
        end(oldest);
        wait = false;
    }
}

void Reader::end(const Reading& reading) {
    tracks_.give_back(reading.track);
    --reading.run->under_way;
}

/// Finishes the jobs of which nothing is left to do.
void Reader::finish_jobs() {
    for (auto run = runs_.begin(); run != runs_.end();) {
        if (!run->ended()) {
            ++run;
            continue;
        }
        run->stats.direct = run->job->file().direct();
        const auto job = std::move(run->job);
        const ReadStats stats = run->stats;
        run = runs_.erase(run);  // closes its streams
        job->finish(stats);
    }
}

}  // namespace datastates
