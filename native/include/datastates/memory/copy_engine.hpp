#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "datastates/checksum/fingerprint.hpp"
#include "datastates/memory/cuda.hpp"
#include "datastates/memory/gather.hpp"
#include "datastates/memory/host_cache.hpp"

namespace datastates {

/// A point in a stream's work. Thread-safe.
class Event {
  public:
    /// Recorded on `stream` now. `keep` lives as long: what the work before the event uses.
    Event(std::shared_ptr<cuda::PrimaryContext> context, cuda::StreamHandle stream,
          std::shared_ptr<const void> keep = nullptr);
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    Event(Event&&) = delete;
    Event& operator=(Event&&) = delete;

    /// Whether the stream has come past it. Throws Error "cuda" when the device failed on the way.
    bool passed() const;
    /// Blocks until it has; a failed device counts as passed, since nothing runs on it any more.
    /// False where the driver let nobody wait for it (cuda::quietly).
    bool synchronize() const;
    /// Lets later work on `stream`, of any device, wait for it.
    void order_before(cuda::StreamHandle stream) const;

  private:
    std::shared_ptr<cuda::PrimaryContext> context_;
    std::shared_ptr<const void> keep_;
    cuda::EventHandle event_ = nullptr;
};

class CopyEngine;

/// Page-locked memory that a kernel is told by, or answers in; returns to its engine, which lends
/// it again when the kernel is through.
class KernelMemory {
  public:
    KernelMemory(std::shared_ptr<CopyEngine> engine, std::byte* memory, std::size_t bytes);
    KernelMemory(KernelMemory&& other) noexcept;
    KernelMemory& operator=(KernelMemory&&) = delete;
    KernelMemory(const KernelMemory&) = delete;
    KernelMemory& operator=(const KernelMemory&) = delete;
    ~KernelMemory();

    std::byte* data() const { return memory_; }
    /// The device reads and writes page-locked host memory at the host's own addresses.
    std::uint64_t device_address() const { return reinterpret_cast<std::uint64_t>(memory_); }

  private:
    friend class CopyEngine;
    std::shared_ptr<CopyEngine> engine_;
    std::byte* memory_;
    std::size_t bytes_;
    std::shared_ptr<Event> used_;  // behind the kernel
};

/// Fingerprints that a kernel is computing, or has computed.
class DeviceFingerprints {
  public:
    DeviceFingerprints(KernelMemory memory, std::size_t count)
        : memory_(std::move(memory)), count_(count) {}

    /// Valid once an event recorded after the launch has passed.
    std::uint64_t at(std::size_t index) const;

  private:
    KernelMemory memory_;
    std::size_t count_;
};

/// What moves bytes between one device and the host: streams of our own, that share nothing with
/// the training's streams but the events between them. Thread-safe.
class CopyEngine : public std::enable_shared_from_this<CopyEngine> {
  public:
    explicit CopyEngine(int ordinal);
    ~CopyEngine();
    CopyEngine(const CopyEngine&) = delete;
    CopyEngine& operator=(const CopyEngine&) = delete;
    CopyEngine(CopyEngine&&) = delete;
    CopyEngine& operator=(CopyEngine&&) = delete;

    /// For lazy sources, to the host.
    cuda::StreamHandle capture_stream() const { return capture_stream_; }
    /// For destinations, from the host.
    cuda::StreamHandle restore_stream() const { return restore_stream_; }
    /// For lazy sources, to spare memory of the device.
    cuda::StreamHandle evacuation_stream() const { return evacuation_stream_; }
    int ordinal() const { return ordinal_; }
    cuda::ContextHandle context() const { return context_->handle(); }
    const std::shared_ptr<cuda::PrimaryContext>& primary_context() const { return context_; }

    /// Compiles the kernels, which the first snapshot would do otherwise.
    void prepare();
    std::shared_ptr<Event> record(cuda::StreamHandle stream,
                                  std::shared_ptr<const void> keep = nullptr) const;
    /// Lets later work on `stream` wait for the event. Of a stream that is being captured the
    /// caller waits: a graph cannot, and what goes into one is done later.
    void wait(cuda::StreamHandle stream, const Event& event) const;
    /// Throws Error "cuda" for a stream that is being captured.
    void require_not_capturing(cuda::StreamHandle stream) const;
    /// See cuda::is_mapped.
    bool has_memory(cuda::DevicePointer pointer, std::uint64_t bytes, std::uint64_t& known) const;
    /// Asynchronous copies; the host side should be page-locked.
    void to_host(std::byte* host, cuda::DevicePointer device, std::size_t bytes,
                 cuda::StreamHandle stream) const;
    void to_device(cuda::DevicePointer device, const std::byte* host, std::size_t bytes,
                   cuda::StreamHandle stream) const;
    /// Blocks until the stream is idle, or its device has failed. False as of Event::synchronize.
    bool drain(cuda::StreamHandle stream) const;
    /// Whether kernels reach page-locked host memory at the host's addresses.
    bool reaches_host() const { return reaches_host_; }
    /// Whether device memory is freed in the order of a stream, without waiting for the device.
    bool frees_in_order() const { return frees_in_order_; }
    /// One kernel launch of at most `max_blocks` for all copies: from the device, to it or to
    /// page-locked host memory (if `reaches_host`). Returns the event behind it.
    std::shared_ptr<Event> gather(std::span<const gather::Range> ranges, cuda::StreamHandle stream,
                                  unsigned max_blocks);
    /// One kernel launch for all ranges.
    DeviceFingerprints fingerprint(std::span<const fingerprint::DeviceRange> ranges,
                                   cuda::StreamHandle stream);

  private:
    friend class KernelMemory;
    struct Spare {
        std::byte* memory;
        std::size_t bytes;
        std::shared_ptr<Event> used;  // behind the last kernel that was given it
    };
    struct Kernels {
        explicit Kernels(const std::shared_ptr<cuda::PrimaryContext>& context);
        cuda::Kernel fingerprint;
        cuda::Kernel gather;
    };
    bool has(int attribute) const;
    void make_streams();
    void destroy_streams() const;
    const Kernels& kernels();
    KernelMemory borrow(std::size_t bytes);
    std::shared_ptr<Event> launch(const cuda::Kernel& kernel, unsigned blocks, unsigned threads,
                                  std::span<void*> parameters, KernelMemory& memory,
                                  cuda::StreamHandle stream);

    const int ordinal_;
    std::shared_ptr<cuda::PrimaryContext> context_;
    bool reaches_host_ = false;
    bool frees_in_order_ = false;
    cuda::StreamHandle capture_stream_ = nullptr;
    cuda::StreamHandle restore_stream_ = nullptr;
    cuda::StreamHandle evacuation_stream_ = nullptr;
    std::mutex mutex_;
    std::unique_ptr<const Kernels> kernels_;
    // Kept for the next snapshot: freeing page-locked memory waits for the whole device.
    std::vector<Spare> spares_;
};

/// The engines of the devices met so far; the first one lets the host cache be page-locked.
/// Thread-safe.
class CopyEngines {
  public:
    explicit CopyEngines(HostCache& cache) : cache_(cache) {}

    /// Throws Error "cuda" when there is no such device.
    std::shared_ptr<CopyEngine> at(int device);

  private:
    HostCache& cache_;
    std::mutex mutex_;
    std::map<int, std::shared_ptr<CopyEngine>> engines_;
};

}  // namespace datastates
