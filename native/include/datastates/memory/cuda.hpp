#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "datastates/base/error.hpp"

/// The CUDA driver, found at run time: the few functions that we use, by our own prototypes, so
/// that one build runs with and without a GPU and needs no toolkit.
namespace datastates::cuda {

using Result = int;
using DevicePointer = std::uint64_t;
using DeviceHandle = int;
struct ContextObject;
struct StreamObject;
struct EventObject;
struct ModuleObject;
struct FunctionObject;
using ContextHandle = ContextObject*;
using StreamHandle = StreamObject*;
using EventHandle = EventObject*;
using ModuleHandle = ModuleObject*;
using FunctionHandle = FunctionObject*;

constexpr Result kSuccess = 0;
constexpr Result kNotReady = 600;
constexpr unsigned kEventDisableTiming = 2;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kHostPortable = 1;
constexpr unsigned kHostDeviceMap = 2;
constexpr int kCaptureModeRelaxed = 2;
constexpr int kCapturingNothing = 0;
// While somebody captures a graph: what is refused for as long as that lasts.
constexpr Result kCaptureUnsupported = 900;
constexpr Result kCaptureImplicit = 906;
// Pointer attributes.
constexpr int kMemoryType = 2;
constexpr int kMapped = 13;
// Device attributes.
constexpr int kHostPointersForRegisteredMemory = 91;
constexpr int kMemoryPoolsSupported = 115;

/// libcuda.so.1's functions.
struct Driver {
    Result (*init)(unsigned flags);
    Result (*device_get_count)(int* count);
    Result (*device_get)(DeviceHandle* device, int ordinal);
    Result (*device_get_attribute)(int* value, int attribute, DeviceHandle device);
    Result (*get_error_name)(Result result, const char** name);
    Result (*primary_context_retain)(ContextHandle* context, DeviceHandle device);
    Result (*primary_context_release)(DeviceHandle device);
    Result (*context_push)(ContextHandle context);
    Result (*context_pop)(ContextHandle* context);
    Result (*stream_create)(StreamHandle* stream, unsigned flags);
    Result (*stream_destroy)(StreamHandle stream);
    Result (*stream_synchronize)(StreamHandle stream);
    Result (*stream_wait_event)(StreamHandle stream, EventHandle event, unsigned flags);
    Result (*event_create)(EventHandle* event, unsigned flags);
    Result (*event_destroy)(EventHandle event);
    Result (*event_record)(EventHandle event, StreamHandle stream);
    Result (*event_query)(EventHandle event);
    Result (*event_synchronize)(EventHandle event);
    Result (*memcpy_to_host)(void* host, DevicePointer device, std::size_t bytes,
                             StreamHandle stream);
    Result (*memcpy_to_device)(DevicePointer device, const void* host, std::size_t bytes,
                               StreamHandle stream);
    Result (*pointer_get_attribute)(void* value, int attribute, DevicePointer pointer);
    Result (*memory_info)(std::size_t* free, std::size_t* total);
    Result (*memory_allocate)(DevicePointer* pointer, std::size_t bytes);
    Result (*memory_free)(DevicePointer pointer);
    Result (*host_allocate)(void** pointer, std::size_t bytes, unsigned flags);
    Result (*host_free)(void* pointer);
    Result (*host_register)(void* pointer, std::size_t bytes, unsigned flags);
    Result (*host_unregister)(void* pointer);
    Result (*module_load_data)(ModuleHandle* module, const void* image);
    Result (*module_unload)(ModuleHandle module);
    Result (*module_get_function)(FunctionHandle* function, ModuleHandle module, const char* name);
    Result (*launch_kernel)(FunctionHandle function, unsigned grid_x, unsigned grid_y,
                            unsigned grid_z, unsigned block_x, unsigned block_y, unsigned block_z,
                            unsigned shared_bytes, StreamHandle stream, void** parameters,
                            void** extra);
    // These may be missing: since CUDA 10.0, 10.1, and 11.2.
    Result (*stream_is_capturing)(StreamHandle stream, int* status);
    Result (*exchange_capture_mode)(int* mode);
    Result (*memory_free_async)(DevicePointer pointer, StreamHandle stream);
};

/// Whether a driver with all our functions was found and started. Thread-safe, as all here.
bool available();

/// How many devices the driver shows; 0 without a driver.
int device_count();

/// The functions. REQUIRES: available().
const Driver& driver();

/// Throws Error "cuda" naming `op` and the driver's name for the error.
void check(Result result, const char* op);

/// A device's primary context, retained: the one that every framework uses.
class PrimaryContext {
  public:
    explicit PrimaryContext(int ordinal);
    ~PrimaryContext();
    PrimaryContext(const PrimaryContext&) = delete;
    PrimaryContext& operator=(const PrimaryContext&) = delete;
    PrimaryContext(PrimaryContext&&) = delete;
    PrimaryContext& operator=(PrimaryContext&&) = delete;

    ContextHandle handle() const { return context_; }
    DeviceHandle device() const { return device_; }

  private:
    DeviceHandle device_ = 0;
    ContextHandle context_ = nullptr;
};

/// Makes a context current in this thread for a scope. Meanwhile this thread's calls also leave
/// alone a CUDA graph that some other thread is capturing; without that, a mere query of ours would
/// invalidate it.
class CurrentContext {
  public:
    explicit CurrentContext(ContextHandle context);
    ~CurrentContext();
    CurrentContext(const CurrentContext&) = delete;
    CurrentContext& operator=(const CurrentContext&) = delete;
    CurrentContext(CurrentContext&&) = delete;
    CurrentContext& operator=(CurrentContext&&) = delete;

  private:
    int capture_mode_;  // the thread's own
};

/// Whether work on a stream goes into a graph instead of being done. REQUIRES: a current context.
bool is_capturing(StreamHandle stream);

/// Throws Error "cuda" if so: what is enqueued for a snapshot or a restore must be done now.
void require_not_capturing(StreamHandle stream);

/// Whether the memory is there, as far as the driver knows: a copy or a kernel of ours that reads
/// what is not could end the context of the training, too. `known` is for the next question, at
/// first kNowhere. REQUIRES: a current context.
bool is_mapped(DevicePointer pointer, std::uint64_t bytes, std::uint64_t& known);
constexpr std::uint64_t kNowhere = ~std::uint64_t{0};

/// Sets how this thread's calls meet graphs that are being captured; returns what was set.
int exchange_capture_mode(int mode);

/// Whether a call was refused for as long as a graph is being captured.
bool is_refused_for_now(Result result);

/// Bears with a call that is refused because a graph is being captured, for as long as captures
/// last: one that lasts longer was never ended.
class Patience {
  public:
    explicit Patience(std::chrono::milliseconds limit = std::chrono::minutes(5))
        : end_(std::chrono::steady_clock::now() + limit) {}
    /// Whether a call with that result is to be made again; returns after a moment then.
    bool again(Result result) const;

  private:
    const std::chrono::steady_clock::time_point end_;
};

/// What a call was refused for to the end of all patience.
Error capture_lasts();

/// For destructors: makes a call with its context current, again while it is refused because a
/// graph is being captured, and passes over any other failure. It fails there only when the process
/// is ending and the driver or the context has gone, or when the device has failed, on which
/// nothing runs any more; its user has been told already. As CurrentContext it leaves graphs alone.
/// False where it was refused to the end: it has not been made.
template <typename Call>
bool quietly(ContextHandle context, Call call) {
    const Patience patience;
    Result result = kSuccess;
    do {
        if (driver().context_push(context) != kSuccess) return true;
        const int mode = exchange_capture_mode(kCaptureModeRelaxed);
        result = call();
        exchange_capture_mode(mode);
        ContextHandle popped = nullptr;
        static_cast<void>(driver().context_pop(&popped));
    } while (patience.again(result));
    return !is_refused_for_now(result);
}

/// A kernel, compiled for the device of the context that is current at the construction.
class Kernel {
  public:
    /// Throws Error "cuda" where the driver takes no such code.
    Kernel(std::shared_ptr<PrimaryContext> context, const char* ptx, const char* name);
    ~Kernel();
    Kernel(const Kernel&) = delete;
    Kernel& operator=(const Kernel&) = delete;
    Kernel(Kernel&&) = delete;
    Kernel& operator=(Kernel&&) = delete;

    FunctionHandle function() const { return function_; }

  private:
    std::shared_ptr<PrimaryContext> context_;
    ModuleHandle module_ = nullptr;
    FunctionHandle function_ = nullptr;
};

/// Host memory, page-locked for every device, and within reach of its kernels.
class PageLock {
  public:
    /// Throws Error "cuda" with the size in the message.
    PageLock(std::shared_ptr<PrimaryContext> context, std::span<std::byte> memory);
    ~PageLock();
    PageLock(const PageLock&) = delete;
    PageLock& operator=(const PageLock&) = delete;
    PageLock(PageLock&&) = delete;
    PageLock& operator=(PageLock&&) = delete;

  private:
    std::shared_ptr<PrimaryContext> context_;
    std::span<std::byte> memory_;
};

}  // namespace datastates::cuda
