#include "datastates/write/capturer.hpp"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "datastates/base/background.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"
#include "datastates/base/thread.hpp"
#include "datastates/checksum/fingerprint.hpp"
#include "datastates/memory/copy_batch.hpp"
#include "datastates/memory/host_fingerprints.hpp"

namespace datastates {
namespace {

// Bytes that keep the bus busy while the thread sleeps: more than a millisecond at 55 GB/s.
constexpr std::uint64_t kShallow = std::uint64_t{64} << 20;
constexpr std::chrono::microseconds kPoll{100};

/// Whether the fault point delays captures: while it fails, the capture thread begins none.
bool is_held_up() { return fault::hit_error(fault::Point::capture) != 0; }

cuda::StreamHandle stream_of(const WriteState& job, std::size_t source) {
    return reinterpret_cast<cuda::StreamHandle>(job.buffers().stream[source]);
}

/// The last extent that holds lazy device memory.
std::optional<std::size_t> last_of_devices(const WriteState& job) {
    const WritePlan& plan = job.plan();
    const auto is_lazy = [&](const WritePlan::Piece& piece) {
        return job.buffers().on_device(piece.source) &&
               !plan.eager(static_cast<std::size_t>(piece.source));
    };
    for (std::size_t i = plan.extents().size(); i-- > 0;) {
        if (std::ranges::any_of(plan.pieces(plan.extents()[i]), is_lazy)) return i;
    }
    return std::nullopt;
}

/// The device copies into one block, stream by stream.
class BlockCopies {
  public:
    explicit BlockCopies(CapturedExtent& captured)
        : captured_(captured), page_locked_(captured.block.page_locked()) {}

    void add(int device, cuda::StreamHandle stream, bool lazy, std::byte* to,
             cuda::DevicePointer from, std::uint64_t nbytes) {
        batch(device, stream, lazy).copies.to_host(to, from, nbytes, page_locked_);
    }
    /// Enqueues the copies and records events that the block waits for. Gates wait for them too,
    /// unless the copies are from `from_image`; the events keep that image alive.
    void enqueue(const std::shared_ptr<DeviceImage>& from_image) {
        WriteState& job = *captured_.job;
        for (Batch& batch : batches_) {
            batch.copies.flush();
            auto event = batch.copies.engine().record(batch.copies.stream(), from_image);
            if (!from_image) job.add_capture_event(batch.device, event, batch.lazy);
            captured_.events.push_back(std::move(event));
        }
    }
    /// Waits for the copies after an error. A block that a device may still write into is lost.
    void drain() const {
        for (const Batch& batch : batches_) {
            if (!batch.copies.engine().drain(batch.copies.stream())) captured_.block.lose();
        }
    }

  private:
    struct Batch {
        int device;
        bool lazy;
        CopyBatch copies;
    };
    /// The batch of a stream. The last one is tried first, as a stream's pieces mostly lie
    /// together.
    Batch& batch(int device, cuda::StreamHandle stream, bool lazy) {
        const auto fits = [&](const Batch& batch) {
            return batch.device == device && batch.lazy == lazy && batch.copies.stream() == stream;
        };
        if (last_ < batches_.size() && fits(batches_[last_])) return batches_[last_];
        const auto found = std::ranges::find_if(batches_, fits);
        last_ = static_cast<std::size_t>(found - batches_.begin());
        if (found == batches_.end()) {
            batches_.push_back({.device = device,
                                .lazy = lazy,
                                .copies = {captured_.job->devices().engine(device), stream}});
        }
        return batches_[last_];
    }

    CapturedExtent& captured_;
    const bool page_locked_;
    std::vector<Batch> batches_;
    std::size_t last_ = 0;
};

}  // namespace

Capturer::Capturer(HostCache& cache, CopyEngines& engines, Writer& writer, bool shallow)
    : cache_(cache),
      engines_(engines),
      writer_(writer),
      shallow_(shallow),
      thread_(start_thread("ds-capturer", [this](const std::stop_token& stop) { run(stop); })) {}

void Capturer::start(const std::shared_ptr<WriteState>& job) {
    std::list<Pending> rest;
    try {
        prepare_devices(*job);
        // After the devices, so that memory for a device is page-locked before its first use.
        cache_.reserve(job->plan().extents().size() * cache_.block_bytes());
        take_fingerprints(*job);
        job->replicas().begin(job->devices(), [&](int device, std::shared_ptr<Event> event) {
            job->add_capture_event(device, std::move(event), false);
        });
        if (auto pending = stage_eager(job)) rest.push_back(std::move(*pending));
    } catch (...) {
        job->fail(Error::current());
        job->end_capture();
        throw;
    }
    if (rest.empty()) {
        job->end_capture();
        return;
    }
    {
        const std::scoped_lock lock(mutex_);
        queue_.splice(queue_.end(), rest);
    }
    queued_.notify_one();
    attend();
}

void Capturer::attend() {
    attention_ = true;
    cache_.poke();
}

void Capturer::prepare_devices(WriteState& job) {
    std::optional<int> last;
    for (std::size_t i = 0; i < job.plan().sources(); ++i) {
        const int device = job.buffers().device[i];
        if (device < 0 || device == last || job.plan().source_nbytes(i) == 0) continue;
        job.devices().add(device, engines_.at(device));
        last = device;
    }
    for (const int device : job.replicas().devices()) {
        job.devices().add(device, engines_.at(device));
    }
}

void Capturer::take_fingerprints(WriteState& job) {
    struct Group {
        int device;
        std::uint64_t stream;
        std::vector<fingerprint::DeviceWords> memory{};
        std::vector<std::size_t> sources{};
        bool lazy = false;
    };
    const WritePlan& plan = job.plan();
    const Buffers& buffers = job.buffers();
    std::vector<Group> groups;
    std::size_t last = 0;
    const auto group_of = [&](std::size_t source) -> Group& {
        const auto fits = [&](const Group& group) {
            return group.device == buffers.device[source] && group.stream == buffers.stream[source];
        };
        if (last < groups.size() && fits(groups[last])) return groups[last];
        const auto found = std::ranges::find_if(groups, fits);
        last = static_cast<std::size_t>(found - groups.begin());
        if (found == groups.end()) {
            groups.push_back({.device = buffers.device[source], .stream = buffers.stream[source]});
        }
        return groups[last];
    };
    Witness& host_witness = job.witness();
    HostFingerprints host(
        [&](std::size_t source, std::uint64_t part) { host_witness.add_before(source, part); },
        [&](std::size_t source) { host_witness.lose(static_cast<std::int32_t>(source)); });
    for (std::size_t i = 0; i < plan.sources(); ++i) {
        if (plan.source_nbytes(i) == 0) continue;
        const bool witness = buffers.witness[i] != 0;
        if (buffers.device[i] < 0) {
            const std::uint64_t first = plan.first_word(i);
            if (witness) {
                host.add(i, buffers.host(i) + first, plan.source_nbytes(i) - first,
                         host_witness.words(i));
            }
            continue;
        }
        Group& group = group_of(i);
        if (plan.eager(i)) continue;  // copied on its producer's stream
        group.lazy = true;
        if (!witness) continue;
        group.memory.push_back({.address = buffers.address[i], .nbytes = plan.source_nbytes(i)});
        group.sources.push_back(i);
    }
    host.finish();
    for (Group& group : groups) {
        CopyEngine& engine = job.devices().engine(group.device);
        auto* stream = reinterpret_cast<cuda::StreamHandle>(group.stream);
        engine.require_not_capturing(stream);
        if (!group.memory.empty()) {
            job.witness().devices().begin(group.device, engine, stream, std::move(group.memory),
                                          std::move(group.sources));
        }
        if (group.lazy) job.devices().add_producer(group.device, engine.record(stream));
    }
}

/// Captures the eager extents. Returns the work that is left for the capture thread, if any.
std::optional<Capturer::Pending> Capturer::stage_eager(const std::shared_ptr<WriteState>& job) {
    const WritePlan& plan = job->plan();
    Pending pending{.job = job, .next_extent = 0, .half_filled = nullptr};
    for (; pending.next_extent < plan.eager_extents(); ++pending.next_extent) {
        const auto waiting = Clock::now();
        std::optional<Block> block = cache_.acquire([&] { return job->stopped(); });
        job->timeline().add(Stage::cache_wait, 0, waiting, 0);
        // The job was stopped. The capture thread drops it like any other stopped job.
        if (!block) return pending;
        const bool mixed = plan.extents()[pending.next_extent].has_lazy;
        auto captured =
            std::make_unique<CapturedExtent>(job, pending.next_extent, std::move(*block));
        const Pick pick = mixed ? Pick::eager : Pick::all;
        copy_devices(*captured, pick, nullptr);
        captured->copy_host(pick);
        if (mixed) {
            pending.half_filled = std::move(captured);
        } else {
            hand_over(std::move(captured), kCallerTrack);
        }
    }
    if (!pending.half_filled && pending.next_extent == plan.extents().size()) return std::nullopt;
    if (job->witness().devices().any()) pending.last_of_devices = last_of_devices(*job);
    return pending;
}

void Capturer::run(const std::stop_token& stop) {
    work_in_background();
    while (Pending* pending = next(stop)) advance(*pending, stop);
}

/// The job to work on: stopped jobs first, as their owners wait; then half-filled blocks (see
/// Capturer); then the oldest job. Null when the thread is to end.
Capturer::Pending* Capturer::next(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    if (!queued_.wait(lock, stop, [&] { return !queue_.empty(); })) return nullptr;
    attention_ = false;
    auto chosen = std::ranges::find_if(queue_, [](const Pending& p) { return p.job->stopped(); });
    if (chosen == queue_.end()) {
        chosen =
            std::ranges::find_if(queue_, [](const Pending& p) { return p.half_filled != nullptr; });
    }
    if (chosen == queue_.end()) chosen = queue_.begin();
    return &*chosen;
}

void Capturer::advance(Pending& pending, const std::stop_token& stop) {
    const std::shared_ptr<WriteState> job = pending.job;
    try {
        if (job->stopped()) {
            pending.half_filled.reset();
            job->claims().close();
        } else if (is_held_up() || (!pending.half_filled && bus_is_full())) {
            std::this_thread::sleep_for(kPoll);
            return;
        } else if (pending.half_filled) {
            order_captures(pending);
            pending.half_filled->begin = Clock::now();
            copy_devices(*pending.half_filled, Pick::lazy, nullptr);
            look_again(pending, *pending.half_filled);
            pending.half_filled->copy_host(Pick::lazy);
            watch_bus(*pending.half_filled);
            hand_over(std::move(pending.half_filled), kThreadTrack);
        } else {
            const auto waiting = Clock::now();
            std::optional<Block> block = cache_.acquire(
                [&] { return attention_ || job->stopped() || stop.stop_requested(); });
            job->timeline().add(Stage::cache_wait, 0, waiting, 0);
            if (!block) return;
            order_captures(pending);
            auto captured =
                std::make_unique<CapturedExtent>(job, pending.next_extent, std::move(*block));
            copy_devices(*captured, Pick::all, job->claims().capture(pending.next_extent));
            look_again(pending, *captured);
            // The thread copies the last extent itself, as it has nothing else to begin.
            const bool last = pending.next_extent + 1 == job->plan().extents().size();
            captured->host_later = writer_.copies_host() && !last && captured->has_host_sources();
            if (!captured->host_later) captured->copy_host(Pick::all);
            ++pending.next_extent;
            watch_bus(*captured);
            hand_over(std::move(captured), kThreadTrack);
        }
    } catch (...) {
        job->fail(Error::current());
        return;  // the next round sees a stopped job
    }
    if (job->stopped() || pending.next_extent == job->plan().extents().size()) {
        remove(pending);
        job->end_capture();
    }
}

/// Makes the job's captures wait for its producers, before the first of them.
void Capturer::order_captures(Pending& pending) {
    if (std::exchange(pending.ordered, true)) return;
    pending.job->devices().order_after_producers(&CopyEngine::capture_stream);
}

void Capturer::remove(const Pending& pending) {
    const std::scoped_lock lock(mutex_);
    queue_.remove_if([&](const Pending& other) { return &other == &pending; });
}

/// Enqueues the extent's device copies: from `image` if there is one, else from the sources.
void Capturer::copy_devices(CapturedExtent& captured, Pick pick,
                            const std::shared_ptr<DeviceImage>& image) {
    WriteState& job = *captured.job;
    const WritePlan& plan = job.plan();
    std::byte* const memory = captured.block.memory().data();
    BlockCopies copies(captured);
    cuda::Mapping known;
    try {
        if (image) {
            CopyEngine& engine = job.devices().engine(job.device_of(captured.index));
            engine.wait(engine.capture_stream(), *image->ready());
        }
        for (const WritePlan::Piece& piece : plan.pieces(captured.extent())) {
            if (!job.buffers().on_device(piece.source)) continue;
            const auto source = static_cast<std::size_t>(piece.source);
            const bool lazy = !plan.eager(source);
            if ((pick == Pick::eager && lazy) || (pick == Pick::lazy && !lazy)) continue;
            const int device = job.buffers().device[source];
            auto* stream =
                lazy ? job.devices().engine(device).capture_stream() : stream_of(job, source);
            if (!image && !job.has_memory(piece, known)) continue;
            const cuda::DevicePointer from =
                image ? image->pointer() + piece.extent_offset
                      : job.buffers().address[source] + piece.source_offset;
            copies.add(device, stream, lazy, memory + piece.extent_offset, from, piece.length);
        }
        copies.enqueue(image);
    } catch (...) {
        copies.drain();
        throw;
    }
}

/// Behind the last copy of lazy device memory, that memory is read again. The extent lands only
/// then.
void Capturer::look_again(const Pending& pending, CapturedExtent& captured) {
    if (pending.last_of_devices != captured.index) return;
    for (auto& event : pending.job->read_devices_again()) {
        captured.events.push_back(std::move(event));
    }
}

/// Whether enough device copies are under way.
bool Capturer::bus_is_full() {
    while (!on_bus_.empty()) {
        const auto event = on_bus_.front().first.lock();
        if (event && !event->passed()) break;
        bytes_on_bus_ -= on_bus_.front().second;
        on_bus_.pop_front();
    }
    return bytes_on_bus_ >= kShallow;
}

void Capturer::watch_bus(const CapturedExtent& captured) {
    if (!shallow_ || captured.events.empty()) return;
    const std::uint64_t bytes = captured.extent().length;
    on_bus_.emplace_back(captured.events.back(), bytes);
    bytes_on_bus_ += bytes;
}

void Capturer::hand_over(std::unique_ptr<CapturedExtent> captured, std::uint32_t track) {
    const bool through = captured->events.empty() && !captured->host_later;
    if (through && captured->extent().has_sources) captured->note_capture(track);
    writer_.hand_over(std::move(captured));
}

}  // namespace datastates
