#include "datastates/write/write_state.hpp"

#include <algorithm>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/checksum/fingerprint.hpp"
#include "datastates/io/file_tail.hpp"

namespace datastates {
namespace {

// Allocating this much takes some 20 ms.
constexpr std::uint64_t kAllocationStep = std::uint64_t{256} << 20;
// How many pieces ahead of the current one to prefetch for fingerprints.
constexpr std::size_t kFetchAhead = 2;

/// Which extents a gate can take: those whose sources are all lazy and on one device. Eager sources
/// are captured at submit, and a processor copies host memory in any case.
std::vector<bool> evacuable_extents(const WritePlan& plan, const Buffers& buffers, bool enabled) {
    std::vector<bool> evacuable(plan.extents().size(), false);
    for (std::size_t i = 0; enabled && i < evacuable.size(); ++i) {
        const WritePlan::Extent& extent = plan.extents()[i];
        if (!extent.has_lazy || extent.has_eager) continue;
        std::optional<int> device;
        bool alike = true;
        for (const WritePlan::Piece& piece : plan.pieces(extent)) {
            if (piece.source < 0) continue;
            const int found = buffers.device[static_cast<std::size_t>(piece.source)];
            alike = alike && found >= 0 && found == device.value_or(found);
            device = found;
        }
        evacuable[i] = alike;
    }
    return evacuable;
}

}  // namespace

WriteState::WriteState(std::shared_ptr<const WritePlan> plan, Buffers buffers, bool device_cache)
    : plan_(std::move(plan)),
      buffers_(std::move(buffers)),
      claims_(evacuable_extents(*plan_, buffers_, device_cache)),
      chunk_crcs_(plan_->first_chunk(plan_->sources()), 0),
      digests_(plan_->digests()),
      before_(plan_->sources(), 0),
      after_(plan_->sources(), 0) {
    source_crcs_.reserve(plan_->sources());
    for (std::size_t i = 0; i < plan_->sources(); ++i) {
        const std::size_t first = plan_->first_chunk(i);
        source_crcs_.emplace_back(
            plan_->chunk_bytes(),
            std::span(chunk_crcs_).subspan(first, plan_->first_chunk(i + 1) - first));
    }
    stats_.bytes = plan_->file_length();
    stats_.extents = plan_->extents().size();
    const std::scoped_lock lock(mutex_);
    settle_locked();
}

void WriteState::begin() {
    const std::scoped_lock lock(mutex_);
    creating_ = capturing_ = true;
}

void WriteState::create(const std::string& path, bool direct, bool by_mapping, unsigned worker) {
    const auto begin = Clock::now();
    bool done = false;
    try {
        if (!stopped()) {
            file_ = std::make_unique<File>(File::create(path, direct));
            {
                const std::scoped_lock lock(mutex_);
                made_ = true;
                changed_.notify_all();
            }
            if (!file_->memory_backed()) {
                file_->allocate(0, plan_->file_length());
            } else if (by_mapping && allocate_memory(*file_)) {
                file_->map(plan_->file_length());
            }
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

bool WriteState::made() const {
    const std::scoped_lock lock(mutex_);
    return made_;
}

/// Allocates the file's memory, in steps, so that a stopped job need not wait for all of it. False
/// if it is not all allocated; stores to the rest would raise SIGBUS on a full file system.
bool WriteState::allocate_memory(const File& file) const {
    const std::uint64_t length = plan_->file_length();
    for (std::uint64_t at = 0; at < length && !stopped(); at += kAllocationStep) {
        if (!file.allocate(at, std::min(kAllocationStep, length - at))) return false;
    }
    return !stopped();
}

void WriteState::checksum(std::size_t source, const CrcFragment& fragment) {
    source_crcs_[source].append(fragment, plan_->full_chunk());
}

std::uint64_t WriteState::fingerprint_of(const WritePlan::Piece& piece,
                                         const std::byte* data) const {
    const auto source = static_cast<std::size_t>(piece.source);
    if (buffers_.witness[source] == 0) return 0;
    const std::uint64_t first = plan_->first_word(source);
    const std::uint64_t before =
        std::min(first - std::min(first, piece.source_offset), piece.length);
    return fingerprint::of_piece(plan_->source_nbytes(source) - first,
                                 piece.source_offset + before - first, data + before,
                                 piece.length - before);
}

void WriteState::fingerprint(const WritePlan::Piece& piece, const std::byte* data) {
    if (buffers_.witness[static_cast<std::size_t>(piece.source)] == 0) return;
    const std::uint64_t found = fingerprint_of(piece, data);
    const std::scoped_lock lock(mutex_);
    after_[static_cast<std::size_t>(piece.source)] += found;
}

bool WriteState::has_memory(const WritePlan::Piece& piece, std::uint64_t& known) const {
    const auto source = static_cast<std::size_t>(piece.source);
    return engine(buffers_.device[source])
        .has_memory(buffers_.address[source] + piece.source_offset, piece.length, known);
}

void WriteState::lose(std::int32_t source) {
    const std::scoped_lock lock(mutex_);
    lost_.insert(source);
}

std::vector<std::uint64_t> WriteState::device_fingerprints(const WritePlan::Extent& extent,
                                                           const std::byte* memory) const {
    const auto pieces = plan_->pieces(extent);
    std::vector<std::uint64_t> fingerprints;
    const auto whole = [&](const WritePlan::Piece& piece) {
        return piece.length == plan_->source_nbytes(static_cast<std::size_t>(piece.source));
    };
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        if (i + kFetchAhead < pieces.size()) {
            const WritePlan::Piece& later = pieces[i + kFetchAhead];
            if (on_device(later) && whole(later)) {
                fingerprint::prefetch(memory + later.extent_offset, later.length);
            }
        }
        if (!on_device(pieces[i])) continue;
        fingerprints.push_back(fingerprint_of(pieces[i], memory + pieces[i].extent_offset));
    }
    return fingerprints;
}

void WriteState::add_engine(int device, std::shared_ptr<CopyEngine> engine) {
    engines_.emplace(device, std::move(engine));
}

void WriteState::set_fingerprint_before(std::size_t source, std::uint64_t value) {
    before_[source] = value;
}

void WriteState::add_fingerprints_before(DeviceFingerprints values,
                                         std::vector<std::size_t> sources) {
    device_before_.push_back({.values = std::move(values), .sources = std::move(sources)});
}

void WriteState::add_producer(int device, std::shared_ptr<Event> event) {
    producers_.emplace_back(device, std::move(event));
}

void WriteState::order_after_producers(int device, cuda::StreamHandle stream) const {
    const CopyEngine& copies = engine(device);
    for (const auto& [where, event] : producers_) {
        if (where == device) copies.wait(stream, *event);
    }
}

void WriteState::order_captures_after_producers() {
    if (std::exchange(captures_ordered_, true)) return;
    for (const auto& [device, copies] : engines_) {
        order_after_producers(device, copies->capture_stream());
    }
}

int WriteState::device_of(std::size_t extent) const {
    for (const WritePlan::Piece& piece : plan_->pieces(plan_->extents()[extent])) {
        if (piece.source >= 0) return buffers_.device[static_cast<std::size_t>(piece.source)];
    }
    return -1;
}

void WriteState::add_capture_event(int device, std::shared_ptr<Event> event, bool lazy) {
    const std::scoped_lock lock(mutex_);
    DeviceCapture& capture = capture_events_[device];
    if (lazy) {
        capture.lazy = std::move(event);
    } else {
        capture.eager.push_back(std::move(event));
    }
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
    capture_events_[device].evacuated = std::move(ready);
    ++source_extents_enqueued_;
    stats_.device_cache_bytes += plan_->extents()[extent].length;
    changed_.notify_all();
}

void WriteState::add_evacuate_seconds(double seconds) {
    const std::scoped_lock lock(mutex_);
    stats_.evacuate_seconds += seconds;
}

void WriteState::extent_landed(const WritePlan::Extent& extent,
                               std::span<const std::uint64_t> device_fingerprints) {
    const std::scoped_lock lock(mutex_);
    auto fingerprint = device_fingerprints.begin();
    for (const WritePlan::Piece& piece : plan_->pieces(extent)) {
        if (fingerprint == device_fingerprints.end()) break;
        if (on_device(piece)) after_[static_cast<std::size_t>(piece.source)] += *fingerprint++;
    }
    ++landed_;
    settle_locked();
}

void WriteState::extent_checksummed() {
    const std::scoped_lock lock(mutex_);
    ++extents_checksummed_;
    settle_locked();
}

void WriteState::extent_retired() {
    const std::scoped_lock lock(mutex_);
    ++retired_;
    settle_locked();
}

void WriteState::end_capture() {
    const std::scoped_lock lock(mutex_);
    capturing_ = false;
    settle_locked();
}

void WriteState::add_cache_wait(double seconds) {
    const std::chrono::duration<double> waited(seconds);
    timeline_.add(Stage::cache_wait, 0,
                  Clock::now() - std::chrono::duration_cast<Clock::duration>(waited), 0);
}

void WriteState::fail(const Error& error) {
    const std::scoped_lock lock(mutex_);
    if (!error_) error_ = error;
    stopped_.store(true, std::memory_order_release);
    changed_.notify_all();
}

void WriteState::settle_locked() {
    if (!error_) {
        if (!captured_ && landed_ == plan_->source_extents()) {
            compare_fingerprints_locked();
            captured_ = true;
            stats_.capture_seconds = seconds_since(start_);
        }
        checksummed_ = extents_checksummed_ == plan_->extents().size();
        if (!written_ && created() && retired_ == plan_->extents().size()) written_ = true;
    }
    changed_.notify_all();
}

void WriteState::compare_fingerprints_locked() {
    for (const Before& batch : device_before_) {
        for (std::size_t i = 0; i < batch.sources.size(); ++i) {
            before_[batch.sources[i]] = batch.values.at(i);
        }
    }
    device_before_.clear();
    for (std::size_t i = 0; i < before_.size(); ++i) {
        const int source = static_cast<int>(i);
        if (before_[i] != after_[i] || lost_.contains(source)) torn_.push_back(source);
    }
}

bool WriteState::wait(std::unique_lock<std::mutex>& lock, Deadline deadline,
                      const bool& done) const {
    const auto settled = [&] { return done || error_.has_value(); };
    if (deadline) {
        if (!changed_.wait_until(lock, *deadline, settled)) return false;
    } else {
        changed_.wait(lock, settled);
    }
    if (!done && error_) throw Error(*error_);
    return true;
}

bool WriteState::wait_made(Deadline deadline) const {
    std::unique_lock lock(mutex_);
    return wait(lock, deadline, made_);
}

bool WriteState::wait_captured(Deadline deadline) const {
    std::unique_lock lock(mutex_);
    return wait(lock, deadline, captured_);
}

bool WriteState::wait_checksummed(Deadline deadline) const {
    std::unique_lock lock(mutex_);
    return wait(lock, deadline, checksummed_);
}

bool WriteState::wait_written(Deadline deadline) const {
    std::unique_lock lock(mutex_);
    return wait(lock, deadline, written_);
}

bool WriteState::gate(std::span<const std::pair<int, std::uint64_t>> streams,
                      Deadline deadline) const {
    std::map<int, DeviceCapture> events;
    {
        std::unique_lock lock(mutex_);
        const auto enqueued = [&] {
            return (!capturing_ && copying_ == 0) ||
                   source_extents_enqueued_ == plan_->source_extents();
        };
        if (deadline) {
            if (!changed_.wait_until(lock, *deadline, enqueued)) return false;
        } else {
            changed_.wait(lock, enqueued);
        }
        events = capture_events_;
    }
    for (const auto& [device, stream] : streams) {
        const auto found = events.find(device);
        if (found == events.end()) continue;
        const auto& [eager, lazy, evacuated] = found->second;
        auto* handle = reinterpret_cast<cuda::StreamHandle>(stream);
        try {
            const CopyEngine& copies = engine(device);
            for (const auto& event : eager) copies.wait(handle, *event);
            if (lazy) copies.wait(handle, *lazy);
            if (evacuated) copies.wait(handle, *evacuated);
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

bool WriteState::captured() const {
    const std::scoped_lock lock(mutex_);
    return captured_;
}

bool WriteState::checksummed() const {
    const std::scoped_lock lock(mutex_);
    return checksummed_;
}

bool WriteState::written() const {
    const std::scoped_lock lock(mutex_);
    return written_;
}

std::vector<int> WriteState::torn() const {
    const std::scoped_lock lock(mutex_);
    return torn_;
}

void WriteState::finish(std::span<const std::byte> tail) {
    static_cast<void>(wait_written(std::nullopt));
    const std::scoped_lock finishing(finish_mutex_);
    {
        const std::scoped_lock lock(mutex_);
        if (error_) throw Error(*error_);
        if (closed_) throw Error::closed("the job is finished already");
    }
    const std::uint64_t length = plan_->file_length() + tail.size();
    try {
        const auto tail_start = Clock::now();
        write_tail(*file_, plan_->file_length() - residual_.size(), residual_, tail);
        timeline_.add(Stage::tail, 0, tail_start, residual_.size() + tail.size());
        const auto start = Clock::now();
        file_->sync();
        timeline_.add(Stage::sync, 0, start, length);
        const std::scoped_lock lock(mutex_);
        stats_.bytes = length;
        stats_.direct = file_->direct();
        closed_ = true;
    } catch (...) {
        fail(Error::current());
        throw;
    }
    file_->close();
}

void WriteState::abandon() {
    const std::scoped_lock lock(finish_mutex_, mutex_);
    if (closed_) return;
    closed_ = true;
    if (!error_) error_ = Error::cancelled();
    if (!file_) return;
    stats_.direct = file_->direct();
    file_->close();
}

WriteStats WriteState::stats() const {
    const std::scoped_lock lock(mutex_);
    WriteStats stats = stats_;
    if (!closed_ && created()) stats.direct = file_->direct();
    return stats;
}

}  // namespace datastates
