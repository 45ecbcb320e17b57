#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "datastates/base/timeline.hpp"
#include "datastates/base/unmovable.hpp"
#include "datastates/base/worker_pool.hpp"
#include "datastates/hash_state.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/plan.hpp"
#include "datastates/read/read_state.hpp"
#include "datastates/read/reader.hpp"
#include "datastates/write/capturer.hpp"
#include "datastates/write/evacuator.hpp"
#include "datastates/write/write_state.hpp"
#include "datastates/write/writer.hpp"

namespace datastates {

class Executor;

/// The path of a file to open, or a file.
using ReadFrom = std::variant<std::string, std::unique_ptr<File>>;
/// The path of a file to create, or who makes it.
using WriteTo = std::variant<std::string, std::shared_ptr<Outlet>>;

/// One snapshot under way; the caller of submit_write owns it. It keeps the executor alive. The
/// destructor aborts a snapshot that is not finished. Thread-safe.
///
/// Waits return false when their deadline passes first; without a deadline they wait for ever.
class WriteJob : Unmovable {
  public:
    WriteJob(std::shared_ptr<Executor> executor, std::shared_ptr<WriteState> state);
    ~WriteJob();

    /// Lets a worker create the file, which must not exist. If that fails, the job fails. With an
    /// outlet, the file is handed over. Call it once, unless submit_write was given the place.
    void create(WriteTo place);
    /// Whether this job has created its file, or has begun to hand it over.
    bool made() const { return state_->made(); }

    /// Waits until the file exists. Throws the job's error if the job fails before that, as every
    /// wait_* does.
    bool wait_made(Deadline deadline = {}) const { return state_->wait_made(deadline); }
    /// Waits until all sources are copied and all replicas digested: their memory is no longer
    /// read.
    bool wait_captured(Deadline deadline = {}) const { return state_->wait_captured(deadline); }
    /// Waits until all checksums and digests are known. That is before the last extent is written.
    bool wait_checksummed(Deadline deadline = {}) const {
        return state_->wait_checksummed(deadline);
    }
    /// Waits until all extents are written (not synced).
    bool wait_written(Deadline deadline = {}) const { return state_->wait_written(deadline); }
    /// Lets the caller change its sources. Waits until every host source is copied and every device
    /// copy is enqueued. Then makes each (device, stream) wait for that device's copies. With a
    /// device cache, extents that the capture thread has not begun are first copied to spare device
    /// memory, as far as there is room. Returns true for a failed job too: nothing reads its
    /// sources any more. Throws Error "cuda" if a stream cannot be made to wait.
    bool gate(std::span<const std::pair<int, std::uint64_t>> streams, Deadline deadline = {}) const;
    bool captured() const { return state_->captured(); }
    bool checksummed() const { return state_->checksummed(); }
    bool written() const { return state_->written(); }
    /// Sources whose fingerprint changed between submit and capture, or whose memory could not be
    /// read. Valid once captured.
    std::vector<int> torn() const { return state_->torn(); }
    /// The digests of replicas, and which of them are over memory that could not be read. Valid
    /// after wait_captured.
    const ReplicaDigests& replicas() const { return state_->replicas(); }
    /// CRC-32 of each source, and of each chunk of all sources in order. Valid once checksummed.
    std::vector<std::uint32_t> source_crcs() const { return state_->checksums().of_sources(); }
    std::span<const std::uint32_t> chunk_crcs() const { return state_->checksums().of_chunks(); }
    /// The digests of the plan's runs. Valid once checksummed.
    std::vector<std::uint32_t> digests() const { return state_->checksums().digests(); }
    /// Hands over the end of a file that is handed over. It is not written before. For finish().
    void hand_end(std::span<const std::byte> tail) { state_->hand_end(tail); }
    /// Waits until written. Then writes `tail` behind the last extent, cuts the file to its exact
    /// length, syncs and closes it. Throws the job's error, and Error "closed" if already finished.
    void finish(std::span<const std::byte> tail) { state_->finish(tail); }
    /// Stops the job. Returns when no thread or device touches the caller's memory and the file is
    /// closed. Idempotent.
    void abort();
    WriteStats stats() const { return state_->stats(); }
    const Timeline& timeline() const { return state_->timeline(); }
    /// The executor's backend, or "memory" for a file that lives in memory.
    std::string backend_name() const;
    /// Whether all reserved memory of the host cache is page-locked.
    bool pinned() const;

  private:
    std::shared_ptr<Executor> executor_;
    std::shared_ptr<WriteState> state_;
};

/// One restore under way; the caller of submit_read owns it. It keeps the executor alive. The
/// destructor stops the restore and waits for it. Thread-safe.
class ReadJob : Unmovable {
  public:
    ReadJob(std::shared_ptr<Executor> executor, std::shared_ptr<ReadState> state);
    ~ReadJob();

    /// Waits for the end. Throws the restore's error; false when the deadline passes first.
    bool wait(Deadline deadline = {}) const { return state_->wait(deadline); }
    /// Lets nothing more begin. Idempotent.
    void stop();
    /// Stops, and returns when no thread or device touches the caller's memory. Idempotent.
    void end();
    ReadStats stats() const { return state_->stats(); }
    const Timeline& timeline() const { return state_->timeline(); }
    std::string backend_name() const;

  private:
    std::shared_ptr<Executor> executor_;
    std::shared_ptr<ReadState> state_;
};

/// Hashes of memory that are being taken; the caller of submit_hash owns it. It keeps the executor
/// alive. The destructor stops what has not begun, and waits. Thread-safe.
class HashJob : Unmovable {
  public:
    HashJob(std::shared_ptr<Executor> executor, std::shared_ptr<HashState> state);
    ~HashJob();

    /// Waits until nothing reads the sources any more; false when the deadline passes first. Throws
    /// the error of a device that has failed.
    bool wait(Deadline deadline = {}) const { return state_->wait(deadline); }
    /// The hashes of all chunks of all sources, end to end. Throws Error "invalid" before they are
    /// known, and the error of a device that has failed.
    std::vector<std::byte> hashes() const;
    /// The sources whose memory was unmapped before it was hashed, ascending. Throws as above.
    std::vector<std::size_t> lost() const;

  private:
    std::shared_ptr<Executor> executor_;
    std::shared_ptr<HashState> state_;
};

/// Runs write, read and hash jobs. It owns the host cache, all threads and both I/O backends. Jobs
/// share ownership of it. Thread-safe.
///
/// The submit functions throw Error "invalid" for a plan or buffers that do not fit, and Error
/// "closed" after close().
class Executor : public std::enable_shared_from_this<Executor>, Unmovable {
  public:
    struct Options {
        std::size_t cache_bytes;           // at most
        std::size_t block_bytes;           // a multiple of 4096
        std::uint64_t device_cache_bytes;  // at most, of each device; 0: none
        unsigned queue_depth;              // reads at a time; twice as many writes
        std::string backend;               // "auto", "io_uring" or "pwrite"
        bool direct;                       // O_DIRECT where the file system allows it
        unsigned io_threads;               // of a pwrite backend
        unsigned workers = WorkerPool::default_size();
    };

    /// Throws Error "invalid" for unusable options, and Error "io" where an explicitly chosen
    /// io_uring is missing.
    static std::shared_ptr<Executor> make(const Options& options);
    ~Executor();

    /// Captures the plan's eager sources and returns. It may wait for cache blocks. The sources'
    /// memory must stay alive until captured or aborted, and lazy sources must stay unchanged as
    /// long. The same holds for `replicas`, which are digested and not written. With a place, the
    /// job's file is created meanwhile, as WriteJob::create does; without one, nothing is written
    /// before the caller calls that, and more eager extents than the cache has blocks would wait
    /// for ever. If this throws, it leaves no file.
    std::unique_ptr<WriteJob> submit_write(const std::optional<WriteTo>& place,
                                           std::shared_ptr<const WritePlan> plan, Buffers sources,
                                           Replicas replicas = {});
    /// Begins a restore. The destinations' memory must stay alive until the job is done or
    /// destroyed.
    std::unique_ptr<ReadJob> submit_read(ReadFrom place, std::shared_ptr<const ReadPlan> plan,
                                         Buffers dests);
    /// Begins to hash `sources`, of `nbytes` each: host memory by all workers, that of each device
    /// by one kernel, behind the work that is on the sources' streams now. Their memory must stay
    /// alive and unchanged until the job is done or destroyed. Throws Error "cuda" also for a
    /// stream that is being captured.
    std::unique_ptr<HashJob> submit_hash(const std::vector<std::uint64_t>& nbytes,
                                         const Buffers& sources);
    /// Refuses new jobs. Waits until the running ones are written or have failed. Idempotent.
    void close();
    /// For a forked child, which does not have the threads. Afterwards the executor and its jobs
    /// wait for no thread, and the executor is never destroyed.
    void abandon();
    bool abandoned() const { return abandoned_; }

    /// Backs `bytes` of the host cache with memory, in the background; also page-locks it once a
    /// device is known. Jobs reserve more when they need it.
    void prepare_cache(std::uint64_t bytes) { cache_.prepare(bytes); }
    /// Creates the device's copy engine and compiles its kernels before the first job. Throws Error
    /// "cuda" when there is no such device.
    void prepare_device(int device) { engines_.at(device)->prepare(); }

    const std::string& backend_name() const { return backend_name_; }
    std::size_t cache_bytes() const { return cache_.bytes(); }
    std::size_t block_bytes() const { return cache_.block_bytes(); }
    bool pinned() const { return cache_.pinned(); }

  private:
    friend class WriteJob;
    friend class ReadJob;
    friend class HashJob;

    explicit Executor(const Options& options);
    template <typename State>
    static void remember(std::vector<std::weak_ptr<State>>& jobs,
                         const std::shared_ptr<State>& job);
    std::size_t most_blocks(ReadState& state) const;
    std::size_t depth_of(ReadState& state) const;
    Reader& reader_of(ReadState& state);
    void admit();
    void create(const std::shared_ptr<WriteState>& state, WriteTo place);
    /// Wakes the writer, which may wait for the job's file, and the capturer if the job has
    /// stopped.
    void look_again(const WriteState& job);
    void wait_for_jobs();

    const bool direct_;
    const std::size_t queue_depth_;
    HostCache cache_;
    CopyEngines engines_;
    WorkerPool workers_;
    Evacuator evacuator_;
    std::mutex mutex_;
    bool closed_ = false;
    std::atomic<bool> abandoned_ = false;
    std::vector<std::weak_ptr<WriteState>> writes_;
    std::vector<std::weak_ptr<ReadState>> reads_;
    std::vector<std::weak_ptr<HashState>> hashes_;
    std::string backend_name_;
    // Threads last: members are destroyed in reverse order, so the capturer stops before the
    // writer.
    Writer writer_;
    Capturer capturer_;
    Reader reader_;
    std::optional<Reader> handed_reader_;  // of handed files, from the first one on
};

}  // namespace datastates
