#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "datastates/base/unmovable.hpp"
#include "datastates/checksum/fingerprint.hpp"
#include "datastates/checksum/hash.hpp"
#include "datastates/memory/cuda.hpp"
#include "datastates/memory/gather.hpp"
#include "datastates/memory/host_cache.hpp"

namespace datastates {

/// A point in a stream's work. Shared by everybody who waits for it. Thread-safe.
class Event : Unmovable {
  public:
    /// Records the event on `stream`. It keeps `keep` alive, which the work before it uses. Throws
    /// Error "cuda", also for a stream that is being captured.
    Event(std::shared_ptr<cuda::PrimaryContext> context, cuda::StreamHandle stream,
          std::shared_ptr<const void> keep = nullptr);
    ~Event();

    /// Whether the stream has passed it. Throws Error "cuda" when the device has failed.
    bool passed() const;
    /// Blocks until the stream has passed it. A failed device counts as passed: nothing runs on it
    /// any more. False where the driver refuses the wait for too long (cuda::quietly).
    bool synchronize() const;
    /// Makes later work on `stream`, of any device, wait for it. REQUIRES: a current context.
    void order_before(cuda::StreamHandle stream) const;

  private:
    std::shared_ptr<cuda::PrimaryContext> context_;
    std::shared_ptr<const void> keep_;
    cuda::EventHandle event_ = nullptr;
};

class CopyEngine;

/// Page-locked memory for the arguments and results of one kernel launch. The destructor returns it
/// to its engine, which lends it again when the kernel has finished. Belongs to one thread at a
/// time.
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
    std::shared_ptr<Event> used_;  // recorded behind the kernel
};

/// Whole fingerprints of device memory, taken once or twice. Their kernel may still be running.
class DeviceDigests {
  public:
    /// `first`: for each range the number of its first piece, and the number of all pieces.
    DeviceDigests(KernelMemory memory, std::vector<std::size_t> first)
        : memory_(std::move(memory)), first_(std::move(first)) {}

    /// The event behind the last kernel.
    const std::shared_ptr<Event>& done() const { return done_; }
    /// The first fingerprint of a range. Valid once its kernel has ended.
    std::uint64_t at(std::size_t range) const;
    /// Whether the two fingerprints of a range differ. Valid once both kernels have ended.
    bool changed(std::size_t range) const;
    /// Lets the second kernel leave a range out, as its memory is gone. Its fingerprints count no
    /// more.
    void leave_out(std::size_t range);

  private:
    friend class CopyEngine;
    std::size_t pieces() const { return first_.back(); }
    /// The sum of a piece, in the first or second run.
    std::uint64_t sum(std::size_t piece, std::size_t run) const;

    KernelMemory memory_;  // DeviceWords of all pieces, their sums, their second sums
    std::shared_ptr<Event> done_;
    std::vector<std::size_t> first_;
};

/// Hashes of chunks of device memory. Their kernel may still be running.
class DeviceHashes {
  public:
    DeviceHashes(KernelMemory memory, std::size_t chunks)
        : memory_(std::move(memory)), chunks_(chunks) {}

    /// The event behind the kernel.
    const std::shared_ptr<Event>& done() const { return done_; }
    /// The hashes of the chunks, end to end. Valid once the kernel has ended.
    std::span<const hash::Hash> all() const;

  private:
    friend class CopyEngine;
    KernelMemory memory_;  // DeviceChunks, their hashes
    std::size_t chunks_;
    std::shared_ptr<Event> done_;
};

/// Equal, equally spaced stretches to copy from the host to a device. The steps count only where
/// there are several.
struct RowCopy {
    cuda::DevicePointer device;  // of the first stretch
    std::size_t device_step;
    const std::byte* host;
    std::size_t host_step;
    std::size_t length;  // of each stretch
    std::size_t count;
};

/// Moves bytes between one device and the host. It owns four streams and the kernels; events order
/// these streams with the training's. Eager copies and the first fingerprints run on the training's
/// own streams. CopyEngines, jobs, device shares and kernel memory share ownership. Thread-safe.
class CopyEngine : public std::enable_shared_from_this<CopyEngine>, Unmovable {
  public:
    /// Throws Error "cuda".
    explicit CopyEngine(int ordinal);
    ~CopyEngine();

    /// For copies of lazy sources to the host.
    cuda::StreamHandle capture_stream() const { return capture_stream_; }
    /// For copies from the host to destinations.
    cuda::StreamHandle restore_stream() const { return restore_stream_; }
    /// For copies of lazy sources to spare device memory, and for kernels behind all copies of
    /// these.
    cuda::StreamHandle evacuation_stream() const { return evacuation_stream_; }
    /// For hashes, which wait for no copies.
    cuda::StreamHandle hash_stream() const { return hash_stream_; }
    int ordinal() const { return ordinal_; }
    cuda::ContextHandle context() const { return context_->handle(); }
    const std::shared_ptr<cuda::PrimaryContext>& primary_context() const { return context_; }

    /// Compiles the kernels. Otherwise the first snapshot that uses them does.
    void prepare();
    std::shared_ptr<Event> record(cuda::StreamHandle stream,
                                  std::shared_ptr<const void> keep = nullptr) const;
    /// Makes later work on `stream` wait for the event. If the stream is being captured, the
    /// calling thread waits instead: the captured work runs later, and a graph cannot wait for the
    /// event.
    void wait(cuda::StreamHandle stream, const Event& event) const;
    /// Throws Error "cuda" for a stream that is being captured.
    void require_not_capturing(cuda::StreamHandle stream) const;
    /// cuda::is_mapped, with this device's context.
    bool has_memory(cuda::DevicePointer pointer, std::uint64_t bytes, cuda::Mapping& known) const;
    /// Enqueue asynchronous copies. The host memory should be page-locked.
    void to_host(std::byte* host, cuda::DevicePointer device, std::size_t bytes,
                 cuda::StreamHandle stream) const;
    void to_device(const RowCopy& rows, cuda::StreamHandle stream) const;
    /// Blocks until the stream is idle or its device has failed. False as in Event::synchronize.
    bool drain(cuda::StreamHandle stream) const;
    /// Whether kernels can use page-locked host memory at the host's addresses.
    bool reaches_host() const { return reaches_host_; }
    /// Whether device memory can be freed in stream order, without waiting for the device.
    bool frees_in_order() const { return frees_in_order_; }
    /// Enqueues all copies as one kernel launch of at most `max_blocks` blocks. They go from device
    /// memory to device memory or, if reaches_host(), to page-locked host memory. Returns the event
    /// behind the kernel.
    std::shared_ptr<Event> gather(std::span<const gather::Range> ranges, cuda::StreamHandle stream,
                                  unsigned max_blocks);
    /// Enqueues one kernel launch that takes the whole fingerprints of all ranges. It reads at the
    /// speed of the device's memory.
    DeviceDigests digest(std::span<const fingerprint::DeviceWords> ranges,
                         cuda::StreamHandle stream);
    /// Does so a second time. Allocates nothing.
    void digest_again(DeviceDigests& digests, cuda::StreamHandle stream);
    /// Enqueues one kernel launch on hash_stream() that takes the hashes of all chunks.
    DeviceHashes hash(std::span<const hash::DeviceChunk> chunks);

  private:
    friend class KernelMemory;
    struct Spare {
        std::byte* memory;
        std::size_t bytes;
        std::shared_ptr<Event> used;  // recorded behind the last kernel that used it
    };
    struct Kernels {
        explicit Kernels(const std::shared_ptr<cuda::PrimaryContext>& context);
        cuda::Kernel digest;
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
    void launch_digest(DeviceDigests& digests, std::size_t run, cuda::StreamHandle stream);

    const int ordinal_;
    std::shared_ptr<cuda::PrimaryContext> context_;
    bool reaches_host_ = false;
    bool frees_in_order_ = false;
    cuda::StreamHandle capture_stream_ = nullptr;
    cuda::StreamHandle restore_stream_ = nullptr;
    cuda::StreamHandle evacuation_stream_ = nullptr;
    cuda::StreamHandle hash_stream_ = nullptr;
    std::mutex mutex_;
    std::unique_ptr<const Kernels> kernels_;
    std::unique_ptr<const cuda::Kernel> hash_kernel_;  // compiled when it is first used
    // Kept until the end: freeing page-locked memory waits for the whole device.
    std::vector<Spare> spares_;
};

/// The engines of the devices used so far, owned by the executor. The first engine makes the host
/// cache page-lock its memory. Thread-safe.
class CopyEngines {
  public:
    explicit CopyEngines(HostCache& cache) : cache_(cache) {}

    /// The device's engine, made at the first call. Throws Error "cuda" if there is no such device.
    std::shared_ptr<CopyEngine> at(int device);

  private:
    HostCache& cache_;
    std::mutex mutex_;
    std::map<int, std::shared_ptr<CopyEngine>> engines_;
};

}  // namespace datastates
