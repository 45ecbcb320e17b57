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
#include <vector>

#include "datastates/base/timeline.hpp"
#include "datastates/base/worker_pool.hpp"
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

/// One snapshot under way. Destroying it aborts it, unless it is finished. Thread-safe.
class WriteJob {
  public:
    WriteJob(std::shared_ptr<Executor> executor, std::shared_ptr<WriteState> state);
    ~WriteJob();
    WriteJob(const WriteJob&) = delete;
    WriteJob& operator=(const WriteJob&) = delete;
    WriteJob(WriteJob&&) = delete;
    WriteJob& operator=(WriteJob&&) = delete;

    /// Whether its file was made for it: not one that was there before.
    bool made() const { return state_->made(); }

    using Deadline = WriteState::Deadline;
    /// The file exists. Throws what the job failed with before that, as all waits do.
    bool wait_made(Deadline deadline = {}) const { return state_->wait_made(deadline); }
    /// All sources are copied off their memory. Throws what the job failed with before that.
    bool wait_captured(Deadline deadline = {}) const { return state_->wait_captured(deadline); }
    /// All checksums and digests are known, before all is written.
    bool wait_checksummed(Deadline deadline = {}) const {
        return state_->wait_checksummed(deadline);
    }
    /// All extents are written (not synced).
    bool wait_written(Deadline deadline = {}) const { return state_->wait_written(deadline); }
    /// Waits until every host source is copied and every device copy is enqueued, and makes each
    /// (device, stream) wait for that device's copies. With a device cache, what is not on its way
    /// to the host yet is copied there first. True also for a failed job, without throwing: nothing
    /// more will be read.
    bool gate(std::span<const std::pair<int, std::uint64_t>> streams, Deadline deadline = {}) const;
    bool captured() const { return state_->captured(); }
    bool checksummed() const { return state_->checksummed(); }
    bool written() const { return state_->written(); }
    /// Sources whose fingerprint changed between submit and capture. Valid once captured.
    std::vector<int> torn() const { return state_->torn(); }
    /// Per source, and per chunk of all sources in order. Valid once checksummed.
    std::vector<std::uint32_t> source_crcs() const;
    std::span<const std::uint32_t> chunk_crcs() const { return state_->chunk_crcs(); }
    /// Of the plan's runs. Valid once checksummed.
    std::vector<std::uint32_t> digests() const { return state_->digests(); }
    /// Waits until written; appends `tail` to the last extent's bytes, cuts the file to its exact
    /// length, syncs and closes it.
    void finish(std::span<const std::byte> tail) { state_->finish(tail); }
    /// Stops, and returns when none of the caller's memory is touched any more and the file is
    /// closed. Idempotent.
    void abort();
    WriteStats stats() const { return state_->stats(); }
    const Timeline& timeline() const { return state_->timeline(); }
    /// What moved the bytes: the executor's backend, or "memory" for a file that lives in memory.
    std::string backend_name() const;
    /// Whether the host cache, as far as it is in use, is page-locked.
    bool pinned() const;

  private:
    std::shared_ptr<Executor> executor_;
    std::shared_ptr<WriteState> state_;
};

/// One restore under way. Destroying it stops it and waits. Thread-safe.
class ReadJob {
  public:
    ReadJob(std::shared_ptr<Executor> executor, std::shared_ptr<ReadState> state);
    ~ReadJob();
    ReadJob(const ReadJob&) = delete;
    ReadJob& operator=(const ReadJob&) = delete;
    ReadJob(ReadJob&&) = delete;
    ReadJob& operator=(ReadJob&&) = delete;

    bool wait(std::optional<Clock::time_point> deadline = {}) const {
        return state_->wait(deadline);
    }
    ReadStats stats() const { return state_->stats(); }
    const Timeline& timeline() const { return state_->timeline(); }
    std::string backend_name() const;

  private:
    std::shared_ptr<Executor> executor_;
    std::shared_ptr<ReadState> state_;
};

/// A part of a file being read before it is known where it goes. Destroying it drops what nobody
/// has taken. Thread-safe.
class ReadAhead {
  public:
    ReadAhead(std::shared_ptr<Executor> executor, std::shared_ptr<ReadState> state,
              std::shared_ptr<Shelf> shelf);
    ~ReadAhead() { close(); }
    ReadAhead(const ReadAhead&) = delete;
    ReadAhead& operator=(const ReadAhead&) = delete;
    ReadAhead(ReadAhead&&) = delete;
    ReadAhead& operator=(ReadAhead&&) = delete;

    /// Returns when nothing is read any more, and no block is held but by a job that took it.
    /// Idempotent.
    void close();
    /// Returns when nothing is read any more.
    void wait() const { state_->wait_done(); }
    /// So far, with alignment; 0 once a job has taken over, which counts them.
    std::uint64_t bytes_read() const { return shelf_->bytes_read(); }

  private:
    friend class Executor;

    std::shared_ptr<Executor> executor_;
    std::shared_ptr<ReadState> state_;
    std::shared_ptr<Shelf> shelf_;
    std::atomic<bool> open_ = true;
};

/// Owns the host cache, the threads and the rings, and runs jobs over them. Jobs keep it alive.
/// Thread-safe.
class Executor : public std::enable_shared_from_this<Executor> {
  public:
    struct Options {
        std::size_t cache_bytes;           // at most
        std::size_t block_bytes;           // a multiple of 4096
        std::uint64_t device_cache_bytes;  // of each device, at most; 0: none
        unsigned queue_depth;              // reads at a time; of writes twice as many
        std::string backend;               // "auto", "io_uring" or "pwrite"
        bool direct;                       // O_DIRECT where the file system allows it
        unsigned io_threads;               // of the pwrite backend
        unsigned workers = WorkerPool::default_size();
    };

    static std::shared_ptr<Executor> make(const Options& options);
    ~Executor();
    Executor(const Executor&) = delete;
    Executor& operator=(const Executor&) = delete;
    Executor(Executor&&) = delete;
    Executor& operator=(Executor&&) = delete;

    /// Captures the plan's eager sources and returns; waits for cache blocks while doing so. The
    /// sources' memory must stay alive until captured or aborted, and lazy sources unchanged. The
    /// file, which must not exist, is made meanwhile: where it cannot be, the job fails. Where this
    /// throws, it leaves no file.
    std::unique_ptr<WriteJob> submit_write(const std::string& path,
                                           std::shared_ptr<const WritePlan> plan, Buffers sources);
    /// `ahead`, of the same file: extents that are the same in it are not read again, all others
    /// are dropped.
    std::unique_ptr<ReadJob> submit_read(const std::string& path,
                                         std::shared_ptr<const ReadPlan> plan, Buffers dests,
                                         ReadAhead* ahead = nullptr);
    /// Begins to read a plan's extents in order, as far as there are blocks at once, until a job
    /// takes them; nothing where another such read is open. What is in memory already is left out:
    /// it is read as quickly when it is known where it goes, as are sparse extents. What fails is
    /// found when it is read again. REQUIRES: no destinations, and extents for at most half of the
    /// cache's blocks, as others wait for those.
    std::unique_ptr<ReadAhead> read_ahead(const std::string& path,
                                          std::shared_ptr<const ReadPlan> plan);
    /// Refuses new jobs and waits until the running ones are written or failed. Idempotent.
    void close();
    /// In a forked child: the threads are the parent's, so neither the executor nor its jobs wait
    /// for them again, and the executor is never destroyed.
    void abandon();
    bool abandoned() const { return abandoned_; }

    /// Backs so much of the host cache with memory beforehand, beside the caller; page-locked once
    /// a device is known. Whatever a job needs is added when it comes.
    void reserve(std::uint64_t bytes) { cache_.reserve(bytes); }
    /// Makes a device known before its first job. Throws Error "cuda" when there is no such device.
    void prepare_device(int device) { engines_.at(device)->prepare(); }

    const std::string& backend_name() const { return backend_name_; }
    std::size_t cache_bytes() const { return cache_.bytes(); }
    std::size_t block_bytes() const { return cache_.block_bytes(); }
    bool pinned() const { return cache_.pinned(); }

  private:
    friend class WriteJob;
    friend class ReadJob;
    friend class ReadAhead;

    explicit Executor(const Options& options);
    template <typename State>
    static void remember(std::vector<std::weak_ptr<State>>& jobs,
                         const std::shared_ptr<State>& job);
    void require_blocks(const ReadPlan& plan) const;
    void admit();
    void admit(const std::shared_ptr<ReadState>& state);
    /// Those who wait for the job's file, or work for it though it has failed, are to do.
    void look_again(const WriteState& job);
    void wait_for_jobs();

    const bool direct_;
    const std::size_t read_blocks_;  // that a restore can make use of
    HostCache cache_;
    CopyEngines engines_;
    WorkerPool workers_;
    Evacuator evacuator_;
    std::mutex mutex_;
    bool closed_ = false;
    std::atomic<bool> abandoned_ = false;
    std::atomic<bool> reading_ahead_ = false;
    std::vector<std::weak_ptr<WriteState>> writes_;
    std::vector<std::weak_ptr<ReadState>> reads_;
    std::string backend_name_;
    // Threads last, in the order that they hand work on: the capturer stops before the writer.
    Writer writer_;
    Capturer capturer_;
    Reader reader_;
};

}  // namespace datastates
