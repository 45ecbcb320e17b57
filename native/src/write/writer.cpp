#include "datastates/write/writer.hpp"

#include <algorithm>
#include <chrono>
#include <utility>

#include "datastates/base/thread.hpp"

namespace datastates {
namespace {

constexpr std::uint64_t kPage = 4096;
// How often to poll for device copies that have landed.
constexpr std::chrono::microseconds kPoll{50};

/// In a worker: copies an extent's host sources. Without device sources the extent is captured
/// then.
void copy(CapturedExtent& captured, unsigned worker) {
    if (!captured.events.empty()) {
        captured.copy_host(Pick::all);
        return;
    }
    captured.begin = Clock::now();
    captured.copy_host(Pick::all);
    captured.note_capture(kWorkerTracks + worker);
    captured.job->extent_landed();
}

/// In a worker.
void digest(CapturedExtent& captured, unsigned worker) {
    WriteState& job = *captured.job;
    const auto begin = Clock::now();
    const std::uint64_t bytes = captured.digest_devices();
    job.timeline().add(Stage::checksum, worker, begin, bytes);
}

}  // namespace

Writer::Writer(HostCache& cache, WorkerPool& workers, std::unique_ptr<IoBackend> backend)
    : cache_(cache),
      workers_(workers),
      backend_(std::move(backend)),
      thread_(start_thread("ds-writer", [this](const std::stop_token& stop) { run(stop); })) {}

void Writer::hand_over(std::unique_ptr<CapturedExtent> extent) {
    const std::shared_ptr<WriteState> job = extent->job;
    const WritePlan::Extent& planned = extent->extent();
    job->extent_enqueued(extent->index, extent->host_later);
    Extents arrival;
    try {
        arrival.emplace_back();  // no later step allocates memory
    } catch (...) {
        job->fail(Error::current());
        if (extent->host_later) job->extent_copied();
        retire(std::move(extent));
        return;
    }
    if (extent->host_later) {
        start_copy(*extent);
    } else if (planned.has_sources && extent->events.empty()) {
        try {
            job->extent_landed();
        } catch (...) {
            job->fail(Error::current());
        }
    }
    arrival.front() = std::move(extent);
    {
        const std::scoped_lock lock(mutex_);
        arrivals_.splice(arrivals_.end(), arrival);
    }
    arrived_.notify_one();
    backend_->wake();
}

void Writer::look_again() {
    {
        const std::scoped_lock lock(mutex_);
        look_again_ = true;
    }
    arrived_.notify_one();
    backend_->wake();
}

void Writer::run(const std::stop_token& stop) {
    std::size_t registered = 0;
    while (take_arrivals(stop)) {
        if (const std::span<std::byte> memory = cache_.populated(); memory.size() > registered) {
            backend_->register_memory(memory, cache_.piece_bytes());
            registered = memory.size();
        }
        // Landings first, because the owner may wait for the end of the capture.
        while (land_next()) {
        }
        if (next_is_ready()) {
            process_next();
            reap(false);
        } else {
            reap(!lands_unseen());
        }
    }
}

/// Takes what other threads have handed over. Waits for it when there is nothing else to do. False
/// when the thread is to end.
bool Writer::take_arrivals(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    const auto arrived = [&] { return !arrivals_.empty() || !stored_.empty() || look_again_; };
    if (next_is_ready()) {
        // Go on at once.
    } else if (lands_unseen()) {
        arrived_.wait_for(lock, kPoll, arrived);
    } else if (backend_->in_flight() == 0) {
        if (!arrived_.wait(lock, stop, arrived)) return false;
    }
    landing_.splice(landing_.end(), arrivals_);
    look_again_ = false;
    const std::list<IoCompletion> stored = std::exchange(stored_, {});
    lock.unlock();
    for (const IoCompletion& completion : stored) complete(completion);
    return true;
}

/// Moves the oldest landing extent to the ready ones if its copies have finished; else false.
bool Writer::land_next() {
    if (!lands_unseen()) return false;
    CapturedExtent& captured = *landing_.front();
    WriteState& job = *captured.job;
    const bool was_landing = !captured.events.empty();
    try {
        const auto passed = [](const auto& event) { return event->passed(); };
        if (!std::ranges::all_of(captured.events, passed)) return false;
        if (was_landing) {
            // Copies of one stream run one after the other, so each begins where the last ended.
            captured.begin = std::max(captured.begin, landed_);
            const int device = std::max(job.device_of(captured.index), 0);
            captured.note_capture(kDeviceTracks + static_cast<std::uint32_t>(device));
            landed_ = Clock::now();
        }
        captured.events.clear();
        if (was_landing && !job.stopped()) {
            job.extent_landed();
            start_digest(captured);
        }
    } catch (...) {
        job.fail(Error::current());
    }
    ready_.splice(ready_.end(), landing_, landing_.begin());
    return true;
}

void Writer::process_next() {
    std::unique_ptr<CapturedExtent> captured = std::move(ready_.front());
    ready_.pop_front();
    const std::shared_ptr<WriteState> job = captured->job;
    try {
        if (!job->stopped()) {
            patch(*captured);
            job->extent_checksummed();
            write(captured);
        }
    } catch (...) {
        job->fail(Error::current());
    }
    if (captured) retire(std::move(captured));
}

void Writer::start_copy(CapturedExtent& captured) {
    captured.working = true;
    const auto job = captured.job;
    try {
        workers_.submit(WorkerPool::Task([this, &captured](unsigned worker) {
            const auto job = captured.job;
            try {
                copy(captured, worker);
            } catch (...) {
                job->fail(Error::current());
            }
            job->extent_copied();
            give_back(captured);
        }));
    } catch (...) {
        job->fail(Error::current());
        job->extent_copied();
        captured.working = false;
    }
}

void Writer::start_digest(CapturedExtent& captured) {
    captured.working = true;
    try {
        workers_.submit(WorkerPool::Task([this, &captured](unsigned worker) {
            try {
                digest(captured, worker);
            } catch (...) {
                captured.job->fail(Error::current());
            }
            give_back(captured);
        }));
    } catch (...) {
        captured.working = false;
        throw;
    }
}

/// Called by a worker that has finished its work on the extent.
void Writer::give_back(CapturedExtent& captured) {
    const std::scoped_lock lock(mutex_);
    captured.working = false;
    look_again_ = true;
    arrived_.notify_one();
    backend_->wake();
}

/// Adds the extent's checksums to those of its sources, in file order. Then writes the checksums
/// that the plan's patches ask for into the extent.
void Writer::patch(const CapturedExtent& captured) {
    WriteState& job = *captured.job;
    captured.tell_checksums();
    for (const WritePlan::Patch& patch : job.plan().patches(captured.extent())) {
        const std::uint32_t crc = job.checksums().of(static_cast<std::size_t>(patch.source));
        patch.apply(crc, captured.block.memory());
    }
}

/// Starts the write, or hands the extent over, and takes it, unless it has no whole page to write.
void Writer::write(std::unique_ptr<CapturedExtent>& captured) {
    if (Outlet* const outlet = captured->job->outlet()) {
        outlet->put(captured);
        return;
    }
    const WritePlan::Extent& extent = captured->extent();
    const std::span<std::byte> memory = captured->block.memory();
    // Only the last extent can end within a page. finish() writes its rest with the tail.
    const std::uint64_t whole = extent.length / kPage * kPage;
    if (whole < extent.length) {
        captured->job->file().keep_residual(memory.subspan(whole, extent.length - whole));
    }
    if (whole == 0) return;
    const std::uint64_t token = next_token_++;
    const IoRequest request{.kind = IoKind::write,
                            .file = &captured->job->file().file(),
                            .buffer = memory.data(),
                            .length = whole,
                            .required = whole,
                            .offset = extent.offset,
                            .token = token};
    const bool stored = captured->job->memory_backed();
    const auto flight = in_flight_.try_emplace(token).first;
    flight->second = {.extent = std::move(captured), .request = request};
    try {
        if (stored) {
            start_store(request);
        } else {
            backend_->submit(request);
        }
    } catch (...) {
        captured = std::move(flight->second.extent);
        in_flight_.erase(flight);
        throw;
    }
}

void Writer::start_store(const IoRequest& request) {
    std::list<IoCompletion> made(1);  // allocated here, where an error can be thrown
    workers_.submit(
        WorkerPool::Task([this, request, made = std::move(made)](unsigned worker) mutable {
            IoCompletion& stored = made.front();
            stored = {.token = request.token, .begin = Clock::now()};
            try {
                stored = request.file->transfer(request);
                request.file->descriptor()->let_go(request.offset, request.length);
            } catch (...) {
                stored.error = Error::current();
            }
            stored.note_end(worker);
            const std::scoped_lock lock(mutex_);
            stored_.splice(stored_.end(), made);
            arrived_.notify_one();
            backend_->wake();
        }));
}

void Writer::reap(bool wait) {
    if (backend_->in_flight() == 0) return;
    std::vector<IoCompletion> completions;
    try {
        completions = backend_->reap(wait);
    } catch (...) {
        for (auto& [token, flight] : in_flight_) flight.extent->job->fail(Error::current());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
    }
    for (const IoCompletion& completion : completions) complete(completion);
}

void Writer::complete(const IoCompletion& completion) {
    const auto found = in_flight_.find(completion.token);
    InFlight flight = std::move(found->second);
    in_flight_.erase(found);
    WriteState& job = *flight.extent->job;
    job.timeline().add({.stage = Stage::write,
                        .track = completion.slot,
                        .begin = completion.begin,
                        .end = completion.end,
                        .bytes = completion.transferred});
    try {
        if (!completion.ok()) throw io_error(completion, flight.request);
    } catch (...) {
        job.fail(Error::current());
    }
    retire(std::move(flight.extent));
}

}  // namespace datastates
