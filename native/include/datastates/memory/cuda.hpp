#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "datastates/base/error.hpp"
#include "datastates/base/unmovable.hpp"

/// The few functions of the CUDA driver that we use. They are declared here and loaded at run time,
/// so that one build runs with and without a GPU and needs no toolkit.
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
// Returned for calls that the driver refuses while a graph is being captured.
constexpr Result kCaptureUnsupported = 900;
constexpr Result kCaptureImplicit = 906;
// Pointer attributes.
constexpr int kMemoryType = 2;
constexpr int kMapped = 13;
constexpr int kMappingSize = 18;
constexpr int kMappingBase = 19;
// Kinds of memory.
constexpr int kHostMemory = 1;
constexpr int kDeviceMemory = 2;
// The largest step of a RectangleCopy.
constexpr std::size_t kMaxPitch = (std::size_t{1} << 31) - 1;
// Device attributes.
constexpr int kHostPointersForRegisteredMemory = 91;
constexpr int kMemoryPoolsSupported = 115;

/// The driver's CUDA_MEMCPY2D: rows of equal length, equally spaced, of either kind of memory.
struct RectangleCopy {
    std::size_t source_x = 0;
    std::size_t source_y = 0;
    int source_memory;
    const void* source_host = nullptr;
    DevicePointer source_device = 0;
    void* source_array = nullptr;
    std::size_t source_step;
    std::size_t dest_x = 0;
    std::size_t dest_y = 0;
    int dest_memory;
    void* dest_host = nullptr;
    DevicePointer dest_device = 0;
    void* dest_array = nullptr;
    std::size_t dest_step;
    std::size_t width;
    std::size_t height;
};

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
    Result (*memcpy_rectangle)(const RectangleCopy* copy, StreamHandle stream);
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
    // These may be null: they exist since CUDA 10.0, 10.1 and 11.2.
    Result (*stream_is_capturing)(StreamHandle stream, int* status);
    Result (*exchange_capture_mode)(int* mode);
    Result (*memory_free_async)(DevicePointer pointer, StreamHandle stream);
};

/// Whether a driver with all required functions was found and initialized. Thread-safe, as all
/// functions here.
bool available();

/// The number of devices that the driver shows; 0 without a driver.
int device_count();

/// The driver's functions. REQUIRES: available().
const Driver& driver();

/// Throws Error "cuda" unless the result is success. The message has `op` and the driver's name for
/// the error.
void check(Result result, const char* op);

/// Retains a device's primary context, which every framework uses. Shared by all who need it.
class PrimaryContext : Unmovable {
  public:
    explicit PrimaryContext(int ordinal);
    ~PrimaryContext();

    ContextHandle handle() const { return context_; }
    DeviceHandle device() const { return device_; }

    /// An event without timing. Used ones come first, because a driver call costs more the more
    /// threads make some. REQUIRES: the context is current.
    EventHandle take_event();
    /// Keeps an event for take_event().
    void give_back(EventHandle event) noexcept;

  private:
    DeviceHandle device_ = 0;
    ContextHandle context_ = nullptr;
    std::mutex mutex_;
    std::vector<EventHandle> events_;
};

/// Makes a context current in the calling thread for a scope. It also sets the thread's capture
/// mode to relaxed. Otherwise even a query from here would invalidate a CUDA graph that another
/// thread is capturing.
class CurrentContext : Unmovable {
  public:
    explicit CurrentContext(ContextHandle context);
    ~CurrentContext();

  private:
    int capture_mode_;  // the thread's mode before
};

/// Whether the stream is being captured: work on it goes into a graph and does not run now.
/// REQUIRES: a current context.
bool is_capturing(StreamHandle stream);

/// Throws Error "cuda" if the stream is being captured: work of a snapshot or restore must run now.
/// REQUIRES: a current context.
void require_not_capturing(StreamHandle stream);

/// Addresses from `begin` to before `end` that are mapped.
struct Mapping {
    DevicePointer begin = 0;
    DevicePointer end = 0;
};

/// Whether the driver knows the whole range as mapped memory. A copy or kernel that reads unmapped
/// memory could end the context, and the training with it. `known` remembers the last mapping
/// found, so that the next call asks less; pass an empty one at first. REQUIRES: a current context.
bool is_mapped(DevicePointer pointer, std::uint64_t bytes, Mapping& known);

/// Sets the calling thread's stream capture mode and returns the mode before.
int exchange_capture_mode(int mode);

/// Whether the driver refused a call because a graph is being captured.
bool is_refused_for_now(Result result);

/// Retries a call that is refused because a graph is being captured, until a time limit. A capture
/// that lasts longer was probably never ended.
class Patience {
  public:
    explicit Patience(std::chrono::milliseconds limit = std::chrono::minutes(5))
        : end_(std::chrono::steady_clock::now() + limit) {}
    /// Whether to make a call with this result again. Sleeps for a millisecond before it returns
    /// true.
    bool again(Result result) const;

  private:
    const std::chrono::steady_clock::time_point end_;
};

/// The error for a call that was refused until the limit of Patience.
Error capture_lasts();

/// Makes a call, with `context` current and in relaxed capture mode. For destructors and waits that
/// must not throw. It retries while a graph is being captured and ignores any other failure: such a
/// failure means that the process is ending and the driver or context is gone, or that the device
/// has failed, which its user has been told already. False where the call was refused until the
/// limit of Patience; it has then not been made.
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

/// A kernel, compiled for the context that is current at construction. Owned by a CopyEngine.
class Kernel : Unmovable {
  public:
    /// Throws Error "cuda" where the driver refuses the code.
    Kernel(std::shared_ptr<PrimaryContext> context, const char* ptx, const char* name);
    ~Kernel();

    FunctionHandle function() const { return function_; }

  private:
    std::shared_ptr<PrimaryContext> context_;
    ModuleHandle module_ = nullptr;
    FunctionHandle function_ = nullptr;
};

/// Page-locks host memory for every device, so that copies and kernels can use it. Owned by a piece
/// of the host cache, which keeps the memory.
class PageLock : Unmovable {
  public:
    /// Throws Error "cuda"; the message has the size.
    PageLock(std::shared_ptr<PrimaryContext> context, std::span<std::byte> memory);
    ~PageLock();

  private:
    std::shared_ptr<PrimaryContext> context_;
    std::span<std::byte> memory_;
};

}  // namespace datastates::cuda
