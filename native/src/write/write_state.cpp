#include "datastates/write/write_state.hpp"

#include <chrono>
#include <thread>
#include <utility>

namespace datastates {
namespace {

// How often to poll for a kernel's end.
constexpr std::chrono::microseconds kPoll{100};

}  // namespace

WriteState::WriteState(std::shared_ptr<const WritePlan> plan, Buffers buffers, Replicas replicas,
                       bool device_cache)
    : plan_(std::move(plan)),
      buffers_(std::move(buffers)),
      claims_(evacuable_extents(*plan_, buffers_, device_cache)),
      witness_(*plan_, buffers_),
      checksums_(*plan_),
      replicas_(std::move(replicas)),
      file_(*plan_) {
    stats_.bytes = plan_->bytes();
    stats_.extents = plan_->extents().size();
    const std::scoped_lock lock(mutex_);
    settle_locked();
}

int WriteState::device_of(std::size_t extent) const {
    for (const WritePlan::Piece& piece : plan_->pieces(plan_->extents()[extent])) {
        if (piece.source >= 0) return buffers_.device[static_cast<std::size_t>(piece.source)];
    }
    return -1;
}

bool WriteState::has_memory(const WritePlan::Piece& piece, cuda::Mapping& known) {
    const auto source = static_cast<std::size_t>(piece.source);
    const CopyEngine& engine = devices_.engine(buffers_.device[source]);
    const std::uint64_t address = buffers_.address[source] + piece.source_offset;
    if (engine.has_memory(address, piece.length, known)) return true;
    witness_.lose(piece.source);
    return false;
}

void WriteState::begin(std::size_t readers) {
    const std::scoped_lock lock(mutex_);
    capturing_ = true;
    reading_ = readers;
}

void WriteState::read_replicas() {
    try {
        replicas_.read(stopped_);
    } catch (...) {
        fail(Error::current());
    }
    const std::scoped_lock lock(mutex_);
    --reading_;
    settle_locked();
}

void WriteState::begin_to_create() {
    const std::scoped_lock lock(mutex_);
    if (begun_) throw Error::invalid("the job's file was created before");
    begun_ = creating_ = true;
}

void WriteState::create(const std::string& path, bool direct, bool by_mapping, unsigned worker) {
    const auto begin = Clock::now();
    bool done = false;
    try {
        if (!stopped()) {
            file_.create(path, direct);
            {
                const std::scoped_lock lock(mutex_);
                made_ = true;
                changed_.notify_all();
            }
            file_.allocate(by_mapping, stopped_);
            timeline_.add(Stage::create, worker, begin, 0);
            done = true;
        }
    } catch (...) {
        fail(Error::current());
    }
    const std::scoped_lock lock(mutex_);
    created_.store(done, std::memory_order_release);
    creating_ = false;
    settle_locked();
}

void WriteState::hand_to(std::shared_ptr<Outlet> outlet, const std::shared_ptr<WriteState>& self) {
    outlet_ = std::move(outlet);
    outlet_->serve(self);
    {
        const std::scoped_lock lock(mutex_);
        made_ = handing_ = true;
        created_.store(true, std::memory_order_release);
        creating_ = false;
        settle_locked();
    }
    if (stopped()) outlet_->drop();  // it may have failed before created()
}

void WriteState::end_handing() {
    const std::scoped_lock lock(mutex_);
    handing_ = false;
    settle_locked();
}

void WriteState::add_capture_event(int device, std::shared_ptr<Event> event, bool lazy) {
    const std::scoped_lock lock(mutex_);
    capture_events_.add(device, std::move(event), lazy);
}

void WriteState::extent_enqueued(std::size_t extent, bool host_later) {
    const bool counts = plan_->extents()[extent].has_sources && !claims_.was_evacuated(extent);
    const std::scoped_lock lock(mutex_);
    ++enqueued_;
    if (host_later) {
        ++copying_;
    } else if (counts) {
        ++source_extents_enqueued_;
    }
    changed_.notify_all();
}

void WriteState::extent_copied() {
    const std::scoped_lock lock(mutex_);
    --copying_;
    ++source_extents_enqueued_;
    changed_.notify_all();
}

void WriteState::extent_evacuated(std::size_t extent, int device, std::shared_ptr<Event> ready) {
    const std::scoped_lock lock(mutex_);
    capture_events_.add_evacuated(device, std::move(ready));
    ++source_extents_enqueued_;
    stats_.device_cache_bytes += plan_->extents()[extent].length;
    changed_.notify_all();
}

std::vector<std::shared_ptr<Event>> WriteState::read_devices_again() {
    const std::scoped_lock again(again_mutex_);
    DeviceWitness& witness = witness_.devices();
    std::vector<std::shared_ptr<Event>> events;
    try {
        if (!std::exchange(read_again_, true)) {
            CaptureEvents copies;
            {
                const std::scoped_lock lock(mutex_);
                copies = capture_events_;
            }
            witness.read_again(copies, devices_, [&](std::size_t source) {
                witness_.lose(static_cast<std::int32_t>(source));
            });
            for (const auto& [device, event] : witness.done()) {
                add_capture_event(device, event, false);
            }
        }
        for (auto& [device, event] : witness.done()) events.push_back(std::move(event));
    } catch (...) {
        fail(Error::current());
    }
    return events;
}

void WriteState::add_evacuate_seconds(double seconds) {
    const std::scoped_lock lock(mutex_);
    stats_.evacuate_seconds += seconds;
}

void WriteState::count(std::size_t& extents) {
    const std::scoped_lock lock(mutex_);
    ++extents;
    settle_locked();
}

void WriteState::end_capture() {
    const std::scoped_lock lock(mutex_);
    capturing_ = false;
    settle_locked();
}

void WriteState::fail(const Error& error) {
    {
        const std::scoped_lock lock(mutex_);
        if (!error_) error_ = error;
        stopped_.store(true, std::memory_order_release);
        changed_.notify_all();
    }
    if (created() && outlet_) outlet_->drop();
}

void WriteState::settle_locked() {
    if (!error_) {
        if (!captured_ && landed_ == plan_->source_extents() && replicas_.host_done()) {
            torn_ = witness_.torn();
            captured_ = true;
            stats_.capture_seconds = seconds_since(start_);
        }
        checksummed_ = extents_checksummed_ == plan_->extents().size();
        const bool retired = retired_ == plan_->extents().size();
        if (!written_ && created() && retired && !handing_) written_ = true;
    }
    changed_.notify_all();
}

bool WriteState::is(const bool& reached) const {
    const std::scoped_lock lock(mutex_);
    return reached;
}

bool WriteState::wait(const bool& reached, Deadline deadline) const {
    std::unique_lock lock(mutex_);
    const auto settled = [&] { return reached || error_.has_value(); };
    if (!wait_until(changed_, lock, deadline, settled)) return false;
    if (!reached && error_) throw Error(*error_);
    return true;
}

bool WriteState::wait_captured(Deadline deadline) const {
    if (!wait(captured_, deadline)) return false;
    // Of devices whose arrays this job does not copy, kernels alone read the memory.
    while (!replicas_.passed()) {
        if (deadline && Clock::now() >= *deadline) return false;
        std::this_thread::sleep_for(kPoll);
    }
    return true;
}

bool WriteState::gate(std::span<const std::pair<int, std::uint64_t>> streams, Deadline deadline) {
    std::unique_lock lock(mutex_);
    const auto enqueued = [&] {
        return reading_ == 0 && ((!capturing_ && copying_ == 0) ||
                                 source_extents_enqueued_ == plan_->source_extents());
    };
    if (!wait_until(changed_, lock, deadline, enqueued)) return false;
    lock.unlock();
    if (!stopped()) static_cast<void>(read_devices_again());
    lock.lock();
    const CaptureEvents events = capture_events_;
    lock.unlock();
    for (const auto& [device, stream] : streams) {
        try {
            events.order_before(device, reinterpret_cast<cuda::StreamHandle>(stream), devices_);
        } catch (const Error&) {
            if (!stopped()) throw;
            // The job has failed, so nothing reads its sources any more.
        }
    }
    return true;
}

void WriteState::wait_quiescent() const {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return quiescent_locked(); });
}

bool WriteState::quiescent() const {
    const std::scoped_lock lock(mutex_);
    return quiescent_locked();
}

std::vector<int> WriteState::torn() const {
    const std::scoped_lock lock(mutex_);
    return torn_;
}

void WriteState::hand_end(std::span<const std::byte> tail) {
    if (created() && outlet_) outlet_->end(tail);
}

void WriteState::finish(std::span<const std::byte> tail) {
    hand_end(tail);
    static_cast<void>(wait_written(std::nullopt));
    const std::scoped_lock finishing(finish_mutex_);
    {
        const std::scoped_lock lock(mutex_);
        if (error_) throw Error(*error_);
        if (closed_) throw Error::closed("the job is finished already");
    }
    try {
        if (!outlet_) file_.finish(tail, timeline_);
        const std::scoped_lock lock(mutex_);
        stats_.bytes += tail.size();
        stats_.direct = !outlet_ && file_.file().direct();
        closed_ = true;
    } catch (...) {
        fail(Error::current());
        throw;
    }
}

void WriteState::abandon() {
    if (created() && outlet_) outlet_->drop();  // a quiescent job may still owe its end
    const std::scoped_lock lock(finish_mutex_, mutex_);
    if (closed_) return;
    closed_ = true;
    if (!error_) error_ = Error::cancelled();
    if (!file_.exists()) return;
    stats_.direct = file_.file().direct();
    file_.file().close();
}

WriteStats WriteState::stats() const {
    const std::scoped_lock lock(mutex_);
    WriteStats stats = stats_;
    if (!closed_ && created() && !outlet_) stats.direct = file_.file().direct();
    return stats;
}

}  // namespace datastates
