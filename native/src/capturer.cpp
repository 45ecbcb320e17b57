#include "datastates/capturer.hpp"

#include <algorithm>
#include <cstring>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "datastates/error.hpp"
#include "datastates/fingerprint.hpp"

namespace datastates {
namespace {

// Copied and digested in steps that stay in the processor's cache.
constexpr std::size_t kStep = std::size_t{256} << 10;

const std::byte* host_memory(const WriteState& job, std::size_t source) {
    return reinterpret_cast<const std::byte*>(job.buffers().address[source]);
}

cuda::StreamHandle stream_of(const WriteState& job, std::size_t source) {
    return reinterpret_cast<cuda::StreamHandle>(job.buffers().stream[source]);
}

bool has_device_bytes(const WriteState& job, std::size_t source) {
    return !job.on_host(source) && job.plan().source_nbytes(source) > 0;
}

/// Streams that were given copies into one block.
class TouchedStreams {
  public:
    explicit TouchedStreams(CapturedExtent& captured) : captured_(captured) {}

    void add(int device, cuda::StreamHandle stream, bool lazy) {
        const Touched entry{.device = device, .stream = stream, .lazy = lazy};
        if (std::ranges::find(touched_, entry) == touched_.end()) touched_.push_back(entry);
    }
    /// From now on the block waits for the copies.
    void record() {
        WriteState& job = *captured_.job;
        for (const Touched& entry : touched_) {
            auto event = job.engine(entry.device).record(entry.stream);
            job.add_capture_event(entry.device, event, entry.lazy);
            captured_.events.push_back(std::move(event));
        }
    }
    void drain() const {
        for (const Touched& entry : touched_) {
            captured_.job->engine(entry.device).drain(entry.stream);
        }
    }

  private:
    struct Touched {
        int device;
        cuda::StreamHandle stream;
        bool lazy;
        bool operator==(const Touched&) const = default;
    };
    CapturedExtent& captured_;
    std::vector<Touched> touched_;
};

}  // namespace

Capturer::Capturer(HostCache& cache, CopyEngines& engines, Writer& writer)
    : cache_(cache),
      engines_(engines),
      writer_(writer),
      thread_([this](const std::stop_token& stop) { run(stop); }) {}

void Capturer::start(const std::shared_ptr<WriteState>& job) {
    std::optional<Pending> rest;
    try {
        prepare_devices(*job);
        take_fingerprints(*job);
        rest = stage_eager(job);
    } catch (...) {
        job->fail(Error::current());
        job->end_capture();
        throw;
    }
    if (!rest) {
        job->end_capture();
        return;
    }
    {
        const std::scoped_lock lock(mutex_);
        queue_.push_back(std::move(*rest));
    }
    queued_.notify_one();
    attend();
}

void Capturer::attend() {
    attention_ = true;
    cache_.poke();
}

void Capturer::prepare_devices(WriteState& job) {
    for (std::size_t i = 0; i < job.plan().sources(); ++i) {
        const int device = job.buffers().device[i];
        if (has_device_bytes(job, i)) job.add_engine(device, engines_.at(device));
    }
}

void Capturer::take_fingerprints(WriteState& job) {
    struct Group {
        std::vector<fingerprint::DeviceRange> ranges;
        std::vector<std::size_t> sources;
        bool lazy = false;
    };
    std::map<std::pair<int, std::uint64_t>, Group> groups;
    const Buffers& buffers = job.buffers();
    for (std::size_t i = 0; i < job.plan().sources(); ++i) {
        const std::uint64_t nbytes = job.plan().source_nbytes(i);
        if (nbytes == 0) continue;
        const bool witness = buffers.witness[i] != 0;
        if (job.on_host(i)) {
            if (witness)
                job.set_fingerprint_before(i, fingerprint::of(host_memory(job, i), nbytes));
            continue;
        }
        Group& group = groups[{buffers.device[i], buffers.stream[i]}];
        group.lazy = group.lazy || !job.plan().eager(i);
        if (!witness) continue;
        group.ranges.push_back({.address = buffers.address[i], .nbytes = nbytes});
        group.sources.push_back(i);
    }
    for (auto& [where, group] : groups) {
        CopyEngine& engine = job.engine(where.first);
        auto* stream = reinterpret_cast<cuda::StreamHandle>(where.second);
        if (!group.ranges.empty()) {
            job.add_fingerprints_before(engine.fingerprint(group.ranges, stream),
                                        std::move(group.sources));
        }
        if (group.lazy) job.add_producer(where.first, engine.record(stream));
    }
}

/// What is left for the capture thread, if anything.
std::optional<Capturer::Pending> Capturer::stage_eager(const std::shared_ptr<WriteState>& job) {
    const WritePlan& plan = job->plan();
    Pending pending{.job = job, .next_extent = 0, .half_filled = nullptr};
    for (; pending.next_extent < plan.eager_extents(); ++pending.next_extent) {
        const auto waiting = Clock::now();
        std::optional<Block> block = cache_.acquire([&] { return job->stopped(); });
        job->add_cache_wait(seconds_since(waiting));
        // Stopped: the queue drops it in one place.
        if (!block) return pending;
        const bool mixed = plan.extents()[pending.next_extent].has_lazy;
        auto captured =
            std::make_unique<CapturedExtent>(job, pending.next_extent, std::move(*block));
        fill(*captured, mixed ? Pick::eager : Pick::all);
        if (mixed) {
            pending.half_filled = std::move(captured);
        } else {
            hand_over(std::move(captured));
        }
    }
    if (!pending.half_filled && pending.next_extent == plan.extents().size()) return std::nullopt;
    return pending;
}

void Capturer::run(const std::stop_token& stop) {
    while (Pending* pending = next(stop)) advance(*pending, stop);
}

/// The job to work on: stopped ones first (somebody waits for them to let go), then half-filled
/// blocks (see above), then the oldest. Null when it is time to end.
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
        } else if (pending.half_filled) {
            job->order_after_producers();
            fill(*pending.half_filled, Pick::lazy);
            hand_over(std::move(pending.half_filled));
        } else {
            const auto waiting = Clock::now();
            std::optional<Block> block = cache_.acquire(
                [&] { return attention_ || job->stopped() || stop.stop_requested(); });
            job->add_cache_wait(seconds_since(waiting));
            if (!block) return;
            job->order_after_producers();
            auto captured =
                std::make_unique<CapturedExtent>(job, pending.next_extent, std::move(*block));
            fill(*captured, Pick::all);
            ++pending.next_extent;
            hand_over(std::move(captured));
        }
    } catch (...) {
        job->fail(Error::current());
        return;  // comes again, as a stopped job
    }
    if (job->stopped() || pending.next_extent == job->plan().extents().size()) {
        remove(pending);
        job->end_capture();
    }
}

void Capturer::remove(const Pending& pending) {
    const std::scoped_lock lock(mutex_);
    queue_.remove_if([&](const Pending& other) { return &other == &pending; });
}

void Capturer::fill(CapturedExtent& captured, Pick pick) {
    WriteState& job = *captured.job;
    const WritePlan& plan = job.plan();
    std::byte* const memory = captured.block.memory().data();
    TouchedStreams touched(captured);
    try {
        for (const WritePlan::Piece& piece : plan.pieces(captured.extent())) {
            std::byte* const to = memory + piece.extent_offset;
            if (piece.source < 0) {
                if (pick != Pick::lazy) std::ranges::copy(plan.literal(piece), to);
                continue;
            }
            const auto source = static_cast<std::size_t>(piece.source);
            const bool lazy = !plan.eager(source);
            if ((pick == Pick::eager && lazy) || (pick == Pick::lazy && !lazy)) continue;
            if (job.on_host(source)) {
                copy_host(job, piece, to);
                continue;
            }
            const int device = job.buffers().device[source];
            const CopyEngine& engine = job.engine(device);
            auto* stream = lazy ? engine.capture_stream() : stream_of(job, source);
            touched.add(device, stream, lazy);
            engine.to_host(to, job.buffers().address[source] + piece.source_offset, piece.length,
                           stream);
        }
        touched.record();
    } catch (...) {
        touched.drain();  // the block must not go back while a device writes into it
        throw;
    }
}

void Capturer::copy_host(WriteState& job, const WritePlan::Piece& piece, std::byte* to) {
    const auto source = static_cast<std::size_t>(piece.source);
    const std::byte* from = host_memory(job, source) + piece.source_offset;
    for (std::uint64_t at = 0; at < piece.length && !job.stopped(); at += kStep) {
        const auto step =
            static_cast<std::size_t>(std::min<std::uint64_t>(kStep, piece.length - at));
        std::memcpy(to + at, from + at, step);
        job.checksum(source, {to + at, step});
    }
    if (!job.stopped()) job.fingerprint(piece, to);
}

void Capturer::hand_over(std::unique_ptr<CapturedExtent> captured) {
    writer_.hand_over(std::move(captured));
}

}  // namespace datastates
