#include "datastates/writer.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <iterator>
#include <utility>

namespace datastates {
namespace {

constexpr std::uint64_t kPage = 4096;
// How long a device copy that has landed may wait to be seen.
constexpr std::chrono::microseconds kPoll{50};

}  // namespace

Writer::Writer(HostCache& cache, std::unique_ptr<IoBackend> backend)
    : cache_(cache),
      backend_(std::move(backend)),
      populator_([this](const std::stop_token& stop) {
          cache_.populate(stop);
          populated_ = true;
      }),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

void Writer::hand_over(std::unique_ptr<CapturedExtent> extent) {
    const bool has_sources = extent->extent().has_sources;
    extent->job->extent_enqueued(has_sources);
    if (has_sources && extent->events.empty()) extent->job->extent_landed();
    {
        const std::scoped_lock lock(mutex_);
        arrivals_.push_back(std::move(extent));
    }
    arrived_.notify_one();
    backend_->wake();
}

void Writer::run(const std::stop_token& stop) {
    bool registered = false;
    while (take_arrivals(stop)) {
        if (!registered && populated_) {
            backend_->register_memory(cache_.region());
            registered = true;
        }
        // Landings first: they are what a gated training step waits for.
        while (land_next()) {
        }
        if (!ready_.empty()) {
            process_next();
            reap(false);
        } else {
            reap(landing_.empty());
        }
    }
}

/// Waits when there is nothing else to do. False when it is time to end.
bool Writer::take_arrivals(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    const auto arrived = [&] { return !arrivals_.empty(); };
    if (landing_.empty() && ready_.empty() && in_flight_.empty()) {
        if (!arrived_.wait(lock, stop, arrived)) return false;
    } else if (ready_.empty() && !landing_.empty()) {
        arrived_.wait_for(lock, kPoll, arrived);
    }
    std::ranges::move(arrivals_, std::back_inserter(landing_));
    arrivals_.clear();
    return true;
}

/// Takes the oldest extent whose device copies are through.
bool Writer::land_next() {
    if (landing_.empty()) return false;
    CapturedExtent& captured = *landing_.front();
    if (!captured.events.empty()) {
        WriteState& job = *captured.job;
        try {
            const auto passed = [](const auto& event) { return event->passed(); };
            if (!std::ranges::all_of(captured.events, passed)) return false;
            for (const WritePlan::Piece& piece : job.plan().pieces(captured.extent())) {
                if (piece.source < 0 || job.on_host(static_cast<std::size_t>(piece.source))) {
                    continue;
                }
                job.fingerprint(piece, captured.block.memory().data() + piece.extent_offset);
            }
            captured.events.clear();
        } catch (...) {
            job.fail(Error::current());
        }
        job.extent_landed();
    }
    ready_.push_back(std::move(landing_.front()));
    landing_.pop_front();
    return true;
}

void Writer::process_next() {
    std::unique_ptr<CapturedExtent> captured = std::move(ready_.front());
    ready_.pop_front();
    const std::shared_ptr<WriteState> job = captured->job;
    if (job->stopped()) {
        retire(std::move(captured));
        return;
    }
    digest_and_patch(*captured);
    write(std::move(captured));
}

void Writer::digest_and_patch(const CapturedExtent& captured) const {
    WriteState& job = *captured.job;
    const std::span<std::byte> memory = captured.block.memory();
    const auto start = Clock::now();
    bool digested = false;
    for (const WritePlan::Piece& piece : job.plan().pieces(captured.extent())) {
        if (piece.source < 0 || job.on_host(static_cast<std::size_t>(piece.source))) continue;
        job.checksum(static_cast<std::size_t>(piece.source),
                     memory.subspan(piece.extent_offset, piece.length));
        digested = true;
    }
    if (digested) job.add_checksum_seconds(seconds_since(start));
    static_assert(std::endian::native == std::endian::little);
    for (const WritePlan::Patch& patch : job.plan().patches(captured.extent())) {
        const std::uint32_t crc = job.source_crc(static_cast<std::size_t>(patch.source));
        std::memcpy(memory.data() + patch.offset, &crc, sizeof crc);
    }
}

void Writer::write(std::unique_ptr<CapturedExtent> captured) {
    const WritePlan::Extent& extent = captured->extent();
    const std::span<std::byte> memory = captured->block.memory();
    // Only the last extent can end off a page; its rest goes out with the tail.
    const std::uint64_t whole = extent.length / kPage * kPage;
    if (whole < extent.length) {
        captured->job->keep_residual(memory.subspan(whole, extent.length - whole));
    }
    if (whole == 0) {
        retire(std::move(captured));
        return;
    }
    captured->job->write_begun();
    const std::uint64_t token = next_token_++;
    const IoRequest request{.kind = IoKind::write,
                            .file = &captured->job->file(),
                            .buffer = memory.data(),
                            .length = whole,
                            .required = whole,
                            .offset = extent.offset,
                            .token = token};
    const std::shared_ptr<WriteState> job = captured->job;
    in_flight_.emplace(token, InFlight{.extent = std::move(captured), .request = request});
    try {
        backend_->submit(request);
    } catch (...) {
        // The request may be queued all the same: its block stays until it completes.
        job->fail(Error::current());
    }
}

void Writer::reap(bool wait) {
    if (in_flight_.empty()) return;
    std::vector<IoCompletion> completions;
    try {
        completions = backend_->reap(wait);
    } catch (...) {
        for (auto& [token, flight] : in_flight_) flight.extent->job->fail(Error::current());
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
        return;
    }
    for (const IoCompletion& completion : completions) {
        const auto found = in_flight_.find(completion.token);
        InFlight flight = std::move(found->second);
        in_flight_.erase(found);
        if (!completion.ok()) {
            flight.extent->job->fail(io_error(completion, flight.request));
        }
        retire(std::move(flight.extent));
    }
}

void Writer::retire(std::unique_ptr<CapturedExtent> extent) {
    const std::shared_ptr<WriteState> job = extent->job;
    extent.reset();  // the block first: whoever waits for the job may want it
    job->extent_retired();
}

}  // namespace datastates
