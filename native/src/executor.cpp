#include "datastates/executor.hpp"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <set>
#include <string>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/io/threads_backend.hpp"
#include "datastates/read/extent_place.hpp"
#include "datastates/read/extent_read.hpp"

namespace datastates {
namespace {

// Room in a block to widen a read to whole pages on both sides.
constexpr std::uint64_t kReadMargin = 8192;
// While the extents of one block end, others begin in the next.
constexpr std::size_t kFewBlocks = 3;
constexpr const char* kMemory = "memory";
constexpr const char* kHanded = "handed";
// What hands bytes over, as a store does, is far away: only many requests at a time are fast.
constexpr std::size_t kHandedAtOnce = 32;
// The storage may complete all its writes at once; then as many are queued already.
constexpr unsigned kWritesPerRead = 2;
// `pwrite` into one tmpfs file reaches 3.2 GB/s with any number of threads. Allocating, mapping and
// filling pages costs more, but is faster from about this many threads on.
constexpr unsigned kStoringWorkers = 4;

template <typename Plan>
std::vector<std::uint64_t> sizes(const Plan& plan, std::size_t count,
                                 std::uint64_t (Plan::*nbytes)(std::size_t) const) {
    std::vector<std::uint64_t> result(count);
    for (std::size_t i = 0; i < count; ++i) result[i] = (plan.*nbytes)(i);
    return result;
}

void require_fits(std::uint64_t extent, std::uint64_t room) {
    if (extent <= room) return;
    throw Error::invalid("the plan has an extent of " + std::to_string(extent) +
                         " bytes, more than the " + std::to_string(room) + " that a block holds");
}

/// Runs a call in a worker or, without memory for a task, here.
template <typename Call>
void submit_or_here(WorkerPool& workers, const Call& call) {
    try {
        workers.submit(WorkerPool::Task(call));
    } catch (const std::bad_alloc&) {
        call(0);
    }
}

/// Leaks an object on purpose, in a forked child. Its destructor would join threads that the child
/// does not have, take locks that they held, or unmap memory that the child has not.
template <typename T>
void keep_for_ever(std::shared_ptr<T> object) {
    static auto* const kept = new std::vector<std::shared_ptr<T>>;
    kept->push_back(std::move(object));
}

}  // namespace

WriteJob::WriteJob(std::shared_ptr<Executor> executor, std::shared_ptr<WriteState> state)
    : executor_(std::move(executor)), state_(std::move(state)) {}

WriteJob::~WriteJob() {
    abort();
    if (executor_->abandoned()) keep_for_ever(std::move(state_));
}

void WriteJob::create(WriteTo place) { executor_->create(state_, std::move(place)); }

void WriteJob::abort() {
    if (executor_->abandoned()) return;
    if (!state_->quiescent()) {
        state_->fail(Error::cancelled());
        executor_->look_again(*state_);
        state_->wait_quiescent();
    }
    state_->abandon();
}

std::string WriteJob::backend_name() const {
    if (state_->created() && state_->outlet() != nullptr) return kHanded;
    return state_->memory_backed() ? kMemory : executor_->backend_name();
}

bool WriteJob::pinned() const { return executor_->pinned(); }

bool WriteJob::gate(std::span<const std::pair<int, std::uint64_t>> streams,
                    Deadline deadline) const {
    executor_->evacuator_.evacuate(*state_);
    if (state_->stopped()) executor_->capturer_.attend();  // evacuation may have failed the job
    const bool passed = state_->gate(streams, deadline);
    if (state_->stopped()) executor_->capturer_.attend();  // so may the second look at its memory
    return passed;
}

ReadJob::ReadJob(std::shared_ptr<Executor> executor, std::shared_ptr<ReadState> state)
    : executor_(std::move(executor)), state_(std::move(state)) {}

ReadJob::~ReadJob() {
    end();
    if (executor_->abandoned()) keep_for_ever(std::move(state_));
}

void ReadJob::stop() {
    if (executor_->abandoned()) return;
    state_->stop();
    executor_->cache_.poke();
}

void ReadJob::end() {
    stop();
    if (!executor_->abandoned()) state_->wait_done();
}

std::string ReadJob::backend_name() const {
    if (state_->file().descriptor() == nullptr) return kHanded;
    return state_->memory_backed() ? kMemory : executor_->backend_name();
}

HashJob::HashJob(std::shared_ptr<Executor> executor, std::shared_ptr<HashState> state)
    : executor_(std::move(executor)), state_(std::move(state)) {}

HashJob::~HashJob() {
    if (executor_->abandoned()) {
        keep_for_ever(std::move(state_));
        return;
    }
    state_->stop();
    state_->wait_done();
}

std::vector<std::byte> HashJob::hashes() const {
    if (!wait(Clock::now())) throw Error::invalid("the hashes are not known yet");
    return state_->hashes();
}

std::vector<std::size_t> HashJob::lost() const {
    if (!wait(Clock::now())) throw Error::invalid("the hashes are not known yet");
    return state_->lost();
}

std::shared_ptr<Executor> Executor::make(const Options& options) {
    // make_shared cannot call the constructor, which is private so that every executor is shared.
    return std::shared_ptr<Executor>(new Executor(options));
}

Executor::Executor(const Options& options)
    : direct_(options.direct),
      queue_depth_(options.queue_depth),
      cache_(options.cache_bytes, options.block_bytes),
      engines_(cache_),
      workers_(options.workers),
      evacuator_(options.device_cache_bytes),
      writer_(
          cache_, workers_,
          make_backend(options.backend, kWritesPerRead * options.queue_depth, options.io_threads)),
      capturer_(cache_, engines_, writer_, evacuator_.enabled()),
      reader_(cache_, workers_,
              make_backend(options.backend, options.queue_depth, options.io_threads),
              options.queue_depth) {
    backend_name_ = writer_.backend_name();
}

Executor::~Executor() {
    // Jobs keep the executor alive, so only failed ones are left that no caller got.
    wait_for_jobs();
    // Workers end first, as a finishing task still wakes the writer or the reader.
    workers_.close();
}

template <typename State>
void Executor::remember(std::vector<std::weak_ptr<State>>& jobs,
                        const std::shared_ptr<State>& job) {
    std::erase_if(jobs, [](const auto& known) { return known.expired(); });
    jobs.push_back(job);
}

void Executor::admit() {
    const std::scoped_lock lock(mutex_);
    if (closed_) throw Error::closed("the executor is closed");
}

std::unique_ptr<WriteJob> Executor::submit_write(const std::optional<WriteTo>& place,
                                                 std::shared_ptr<const WritePlan> plan,
                                                 Buffers sources, Replicas replicas) {
    const auto start = Clock::now();
    sources.validate(sizes(*plan, plan->sources(), &WritePlan::source_nbytes), true);
    require_fits(plan->max_extent_length(), cache_.block_bytes());
    const auto state = std::make_shared<WriteState>(std::move(plan), std::move(sources),
                                                    std::move(replicas), evacuator_.enabled());
    auto job = std::make_unique<WriteJob>(shared_from_this(), state);
    const auto read_replicas = [this, state](unsigned) {
        state->read_replicas();
        look_again(*state);
    };
    const std::size_t readers = std::min<std::size_t>(state->replicas().tasks(), workers_.size());
    {
        const std::scoped_lock lock(mutex_);
        if (closed_) throw Error::closed("the executor is closed");
        remember(writes_, state);
        state->begin(readers);
    }
    if (place) job->create(*place);
    for (std::size_t i = 0; i < readers; ++i) submit_or_here(workers_, read_replicas);
    try {
        capturer_.start(state);
    } catch (...) {
        job->abort();
        const auto* const path = place ? std::get_if<std::string>(&*place) : nullptr;
        if (path != nullptr && state->made()) static_cast<void>(::unlink(path->c_str()));
        throw;
    }
    state->timeline().add(Stage::submit, 0, start, 0);
    return job;
}

void Executor::create(const std::shared_ptr<WriteState>& state, WriteTo place) {
    state->begin_to_create();
    if (auto* const outlet = std::get_if<std::shared_ptr<Outlet>>(&place)) {
        state->hand_to(std::move(*outlet), state);
        look_again(*state);
        return;
    }
    // The executor outlives its workers' tasks.
    const auto create = [this, state, path = std::get<std::string>(place)](unsigned worker) {
        state->create(path, direct_, workers_.size() >= kStoringWorkers, worker);
        look_again(*state);
    };
    submit_or_here(workers_, create);
}

std::unique_ptr<ReadJob> Executor::submit_read(ReadFrom place, std::shared_ptr<const ReadPlan> plan,
                                               Buffers dests) {
    dests.validate(sizes(*plan, plan->dests(), &ReadPlan::dest_nbytes), false);
    require_fits(plan->max_extent_length(),
                 cache_.block_bytes() - std::min<std::uint64_t>(kReadMargin, cache_.block_bytes()));
    admit();
    if (const auto* const path = std::get_if<std::string>(&place)) {
        place =
            std::make_unique<DescriptorFile>(DescriptorFile::open(*path, direct_, plan->shares()));
    }
    auto state = std::make_shared<ReadState>(std::get<std::unique_ptr<File>>(std::move(place)),
                                             std::move(plan), std::move(dests));
    const Buffers& buffers = state->buffers();
    std::set<std::pair<int, std::uint64_t>> streams;
    for (std::size_t i = 0; i < state->plan().dests(); ++i) {
        if (buffers.device[i] < 0 || state->plan().dest_nbytes(i) == 0) continue;
        streams.emplace(buffers.device[i], buffers.stream[i]);
    }
    for (const auto& [device, handle] : streams) {
        const auto engine = engines_.at(device);
        state->devices().add(device, engine);
        auto* stream = reinterpret_cast<cuda::StreamHandle>(handle);
        state->devices().add_producer(device, engine->record(stream));
    }
    // After the engines exist, so that memory for a device is page-locked before its first use.
    cache_.reserve(most_blocks(*state) * cache_.block_bytes());
    Reader& reader = reader_of(*state);
    {
        const std::scoped_lock lock(mutex_);
        if (closed_) throw Error::closed("the executor is closed");
        remember(reads_, state);
    }
    auto job = std::make_unique<ReadJob>(shared_from_this(), state);
    reader.enqueue(state);
    return job;
}

std::unique_ptr<HashJob> Executor::submit_hash(const std::vector<std::uint64_t>& nbytes,
                                               const Buffers& sources) {
    admit();
    const auto state = std::make_shared<HashState>(nbytes, sources);
    const std::size_t calls = std::min<std::size_t>(state->tasks(), workers_.size());
    auto job = std::make_unique<HashJob>(shared_from_this(), state);
    state->launch(engines_);
    {
        const std::scoped_lock lock(mutex_);
        if (closed_) throw Error::closed("the executor is closed");
        remember(hashes_, state);
        state->begin(calls);
    }
    for (std::size_t i = 0; i < calls; ++i) {
        submit_or_here(workers_, [state](unsigned) { state->hash_host(); });
    }
    return job;
}

/// Handed files have a reader of their own, so that no slow answer holds up reads of other files.
Reader& Executor::reader_of(ReadState& state) {
    if (state.file().descriptor() != nullptr) return reader_;
    const std::scoped_lock lock(mutex_);
    if (!handed_reader_) {
        const auto depth = static_cast<unsigned>(depth_of(state));
        handed_reader_.emplace(cache_, workers_, std::make_unique<ThreadsBackend>(depth), depth);
    }
    return *handed_reader_;
}

std::size_t Executor::depth_of(ReadState& state) const {
    return state.file().descriptor() != nullptr ? queue_depth_
                                                : std::max(queue_depth_, kHandedAtOnce);
}

/// The blocks to reserve for a read: as many as its extents that are not read in place use at a
/// time, see Reader::has_room(). Workers are faster than those who hand bytes over: the blocks for
/// what is on its way are enough there. Extents of a file in memory share blocks, and a block is
/// free again once all of them have ended. So they may use somewhat more; then some workers wait.
std::size_t Executor::most_blocks(ReadState& state) const {
    const std::size_t depth = depth_of(state);
    const std::size_t worked = depth + workers_.size();
    const auto needs_block = [&](const ReadPlan::Extent& extent) {
        return in_place(state, state.file(), extent, false) == nullptr;
    };
    const std::size_t extents = std::ranges::count_if(state.plan().extents(), needs_block);
    if (state.file().descriptor() == nullptr) return std::min(extents, worked);
    if (!state.memory_backed()) return std::min(extents, depth + worked);
    const std::size_t windows = std::max(cache_.block_bytes() / (2 * longest_step(state)), 1UL);
    const std::size_t shared = (worked + windows - 1) / windows;
    return std::min(extents, std::max(shared, std::min(worked, kFewBlocks)));
}

void Executor::look_again(const WriteState& job) {
    if (job.stopped()) capturer_.attend();
    writer_.look_again();
}

void Executor::wait_for_jobs() {
    std::vector<std::shared_ptr<WriteState>> writes;
    std::vector<std::shared_ptr<ReadState>> reads;
    std::vector<std::shared_ptr<HashState>> hashes;
    {
        const std::scoped_lock lock(mutex_);
        for (const auto& known : writes_) {
            if (auto job = known.lock()) writes.push_back(std::move(job));
        }
        for (const auto& known : reads_) {
            if (auto job = known.lock()) reads.push_back(std::move(job));
        }
        for (const auto& known : hashes_) {
            if (auto job = known.lock()) hashes.push_back(std::move(job));
        }
    }
    for (const auto& job : writes) job->wait_quiescent();
    for (const auto& job : reads) job->wait_done();
    for (const auto& job : hashes) job->wait_done();
}

void Executor::close() {
    {
        const std::scoped_lock lock(mutex_);
        closed_ = true;
    }
    wait_for_jobs();
}

void Executor::abandon() {
    abandoned_ = true;
    keep_for_ever(shared_from_this());
}

}  // namespace datastates
