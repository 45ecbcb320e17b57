#include "datastates/reader.hpp"

#include <algorithm>
#include <cstring>
#include <iomanip>
#include <set>
#include <sstream>
#include <utility>

#include "datastates/checksum.hpp"
#include "datastates/error.hpp"

namespace datastates {
namespace {

constexpr std::uint64_t kPage = 4096;
// Below this a direct read of its own costs more than a copy out of a block.
constexpr std::uint64_t kInPlaceMinimum = std::uint64_t{64} << 10;

Error mismatch(const std::string& path, const ReadPlan::Extent& extent,
               const ReadPlan::Check& check, std::uint32_t found) {
    std::ostringstream message;
    message << "checksum mismatch in " << path << ", record " << check.record << ", bytes ["
            << extent.offset + check.offset << ", " << extent.offset + check.offset + check.length
            << "): stored " << std::hex << std::setfill('0') << std::setw(8) << check.crc
            << ", found " << std::setw(8) << found;
    return {ErrorCode::corrupt, 0, "verify", path, message.str(), check.record};
}

}  // namespace

Reader::Reader(HostCache& cache, std::unique_ptr<IoBackend> backend, unsigned queue_depth)
    : cache_(cache),
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
    for (;;) {
        std::unique_lock lock(mutex_);
        if (!queued_.wait(lock, stop, [&] { return !queue_.empty(); })) return;
        const std::shared_ptr<ReadState> job = std::move(queue_.front());
        queue_.pop_front();
        lock.unlock();
        stats_ = {};
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
            while (!job.stopped() && next < job.plan().extents().size() &&
                   in_flight_.size() < queue_depth_) {
                if (!start_next(job, next)) break;
                ++next;
            }
        } catch (...) {
            job.fail(next, Error::current());
        }
        release_copied(job, in_flight_.empty());
        if (!in_flight_.empty()) {
            reap(job);
        } else if (copying_.empty() && (job.stopped() || next == job.plan().extents().size())) {
            return;
        }
    }
}

/// False when there is no block, and waiting for one would keep us from our own completions.
bool Reader::start_next(ReadState& job, std::size_t index) {
    const ReadPlan::Extent& extent = job.plan().extents()[index];
    const auto reading = std::make_shared<Reading>(
        Reading{.index = index, .block = std::nullopt, .data = in_place(job, extent), .parts = 0});
    if (reading->data != nullptr) {
        stats_.in_place_bytes += extent.length;
        const std::uint64_t whole =
            job.file().direct()
                ? extent.length / job.file().offset_alignment() * job.file().offset_alignment()
                : extent.length;
        const std::uint64_t rest = extent.length - whole;
        // The rest is less than a page: through the page cache, straight to its place.
        reading->parts = rest == 0 ? 1 : 2;
        submit(job, reading, reading->data, extent.offset, whole, whole);
        if (rest != 0)
            submit(job, reading, reading->data + whole, extent.offset + whole, rest, rest);
        return true;
    }
    reading->block = cache_.try_acquire();
    if (!reading->block) {
        if (!in_flight_.empty() || !copying_.empty()) return false;
        reading->block = cache_.acquire([&] { return job.stopped(); });
        if (!reading->block) return false;
    }
    std::uint64_t begin = extent.offset;
    std::uint64_t end = extent.offset + extent.length;
    if (job.file().direct() && job.file().offset_alignment() <= kPage) {
        begin = begin / kPage * kPage;
        end = (end + kPage - 1) / kPage * kPage;
    }
    std::byte* const memory = reading->block->memory().data();
    reading->data = memory + (extent.offset - begin);
    reading->parts = 1;
    submit(job, reading, memory, begin, end - begin, extent.offset + extent.length - begin);
    return true;
}

/// Where an extent can be read to without a block between, or null.
std::byte* Reader::in_place(ReadState& job, const ReadPlan::Extent& extent) const {
    const auto pieces = job.plan().pieces(extent);
    if (pieces.size() != 1) return nullptr;
    const ReadPlan::Piece& piece = pieces.front();
    const auto dest = static_cast<std::size_t>(piece.dest);
    if (job.buffers().device[dest] >= 0 || piece.length != extent.length) return nullptr;
    auto* const to = reinterpret_cast<std::byte*>(job.buffers().address[dest] + piece.dest_offset);
    const File& file = job.file();
    if (!file.direct()) return to;
    const bool fits = extent.length >= kInPlaceMinimum &&
                      file.fits_direct(to, file.offset_alignment(), extent.offset);
    return fits ? to : nullptr;
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
        const Part part = std::move(found->second);
        in_flight_.erase(found);
        Reading& reading = *part.reading;
        stats_.bytes_read += completion.transferred;
        try {
            if (!completion.ok()) throw io_error(completion, part.request);
            if (--reading.parts == 0) complete(job, reading);
        } catch (...) {
            job.fail(reading.index, Error::current());
        }
    }
}

void Reader::complete(ReadState& job, Reading& reading) {
    const ReadPlan::Extent& extent = job.plan().extents()[reading.index];
    verify(job, extent, reading.data);
    if (reading.block) scatter(job, extent, reading.data, std::move(*reading.block));
}

void Reader::verify(const ReadState& job, const ReadPlan::Extent& extent, const std::byte* data) {
    const auto start = Clock::now();
    for (const ReadPlan::Check& check : job.plan().checks(extent)) {
        const std::uint32_t found = crc32(0, {data + check.offset, check.length});
        if (found != check.crc) throw mismatch(job.path(), extent, check, found);
    }
    stats_.verify_seconds += seconds_since(start);
}

void Reader::scatter(const ReadState& job, const ReadPlan::Extent& extent, const std::byte* data,
                     Block block) {
    std::set<int> devices;
    Copying copying{.block = std::move(block), .events = {}};
    try {
        for (const ReadPlan::Piece& piece : job.plan().pieces(extent)) {
            const auto dest = static_cast<std::size_t>(piece.dest);
            const std::byte* const from = data + piece.extent_offset;
            const std::uint64_t to = job.buffers().address[dest] + piece.dest_offset;
            const int device = job.buffers().device[dest];
            if (piece.length == 0) continue;
            if (device < 0) {
                std::memcpy(reinterpret_cast<void*>(to), from, piece.length);
                continue;
            }
            const CopyEngine& engine = job.engine(device);
            devices.insert(device);
            engine.to_device(to, from, piece.length, engine.restore_stream());
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
        copying_.pop_front();
        wait = false;
    }
}

}  // namespace datastates
