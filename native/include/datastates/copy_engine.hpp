#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "datastates/fingerprint.hpp"
#include "datastates/host_cache.hpp"
#include "datastates/shim/cuda.hpp"

namespace datastates {

/// A point in a stream's work. Thread-safe.
class Event {
  public:
    /// Recorded on `stream` now.
    Event(std::shared_ptr<cuda::PrimaryContext> context, cuda::StreamHandle stream);
    ~Event();
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    Event(Event&&) = delete;
    Event& operator=(Event&&) = delete;

    /// Whether the stream has come past it. Throws Error "cuda" when the device failed on the way.
    bool passed() const;
    /// Blocks until it has; a failed device counts as passed, since nothing runs on it any more.
    void synchronize() const;
    /// Lets later work on `stream`, of any device, wait for it.
    void order_before(cuda::StreamHandle stream) const;

  private:
    std::shared_ptr<cuda::PrimaryContext> context_;
    cuda::EventHandle event_ = nullptr;
};

class CopyEngine;

/// Fingerprints that a kernel is computing, or has computed, in page-locked memory.
class DeviceFingerprints {
  public:
    DeviceFingerprints(std::shared_ptr<CopyEngine> engine, std::byte* memory, std::size_t bytes,
                       std::size_t count);
    DeviceFingerprints(DeviceFingerprints&& other) noexcept;
    DeviceFingerprints& operator=(DeviceFingerprints&&) = delete;
    DeviceFingerprints(const DeviceFingerprints&) = delete;
    DeviceFingerprints& operator=(const DeviceFingerprints&) = delete;
    ~DeviceFingerprints();

    /// Valid once an event recorded after the launch has passed.
    std::uint64_t at(std::size_t index) const;

  private:
    friend class CopyEngine;
    std::shared_ptr<CopyEngine> engine_;
    std::byte* memory_;
    std::size_t bytes_;
    std::size_t count_;
    std::shared_ptr<Event> used_;  // behind the kernel
};

/// What moves bytes between one device and the host: two streams of our own, one for each
/// direction, that share nothing with the training's streams but the events between them.
/// Thread-safe.
class CopyEngine : public std::enable_shared_from_this<CopyEngine> {
  public:
    explicit CopyEngine(int ordinal);
    ~CopyEngine();
    CopyEngine(const CopyEngine&) = delete;
    CopyEngine& operator=(const CopyEngine&) = delete;
    CopyEngine(CopyEngine&&) = delete;
    CopyEngine& operator=(CopyEngine&&) = delete;

    cuda::StreamHandle capture_stream() const { return capture_stream_; }
    cuda::StreamHandle restore_stream() const { return restore_stream_; }
    cuda::ContextHandle context() const { return context_->handle(); }
    const std::shared_ptr<cuda::PrimaryContext>& primary_context() const { return context_; }

    std::shared_ptr<Event> record(cuda::StreamHandle stream) const;
    void wait(cuda::StreamHandle stream, const Event& event) const;
    /// Asynchronous copies; the host side should be page-locked.
    void to_host(std::byte* host, cuda::DevicePointer device, std::size_t bytes,
                 cuda::StreamHandle stream) const;
    void to_device(cuda::DevicePointer device, const std::byte* host, std::size_t bytes,
                   cuda::StreamHandle stream) const;
    /// Blocks until the stream is idle, or its device has failed.
    void drain(cuda::StreamHandle stream) const;
    /// One kernel launch for all ranges.
    DeviceFingerprints fingerprint(std::span<const fingerprint::DeviceRange> ranges,
                                   cuda::StreamHandle stream);

  private:
    friend class DeviceFingerprints;
    struct Spare {
        std::byte* memory;
        std::size_t bytes;
        std::shared_ptr<Event> used;  // behind the last kernel that was given it
    };
    Spare take_page_locked(std::size_t bytes);

    std::shared_ptr<cuda::PrimaryContext> context_;
    cuda::StreamHandle capture_stream_ = nullptr;
    cuda::StreamHandle restore_stream_ = nullptr;
    std::mutex mutex_;
    cuda::ModuleHandle module_ = nullptr;
    cuda::FunctionHandle kernel_ = nullptr;
    // Kept for the next snapshot: freeing page-locked memory waits for the whole device.
    std::vector<Spare> spares_;
};

/// The engines of the devices met so far; the first one page-locks the host cache. Thread-safe.
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
