#include "datastates/memory/cuda.hpp"

#include <dlfcn.h>

#include <chrono>
#include <new>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"

namespace datastates::cuda {
namespace {

// The smallest unit in which device memory is mapped.
constexpr std::uint64_t kGranule = std::uint64_t{2} << 20;
// How long to sleep between tries while a graph is being captured.
constexpr std::chrono::milliseconds kPoll{1};

/// Loads libcuda. It stays loaded until the process ends, because the driver's exit handlers run in
/// it.
class Library {
  public:
    Library() {
        void* handle = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) return;
        bool complete = true;
        const auto load = [&](auto& function, const char* symbol) {
            void* address = ::dlsym(handle, symbol);
            function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
            complete = complete && address != nullptr;
        };
        // cuda.h's macros map the plain names to these versioned ones.
        load(driver_.init, "cuInit");
        load(driver_.device_get_count, "cuDeviceGetCount");
        load(driver_.device_get, "cuDeviceGet");
        load(driver_.device_get_attribute, "cuDeviceGetAttribute");
        load(driver_.get_error_name, "cuGetErrorName");
        load(driver_.primary_context_retain, "cuDevicePrimaryCtxRetain");
        load(driver_.primary_context_release, "cuDevicePrimaryCtxRelease_v2");
        load(driver_.context_push, "cuCtxPushCurrent_v2");
        load(driver_.context_pop, "cuCtxPopCurrent_v2");
        load(driver_.stream_create, "cuStreamCreate");
        load(driver_.stream_destroy, "cuStreamDestroy_v2");
        load(driver_.stream_synchronize, "cuStreamSynchronize");
        load(driver_.stream_wait_event, "cuStreamWaitEvent");
        load(driver_.event_create, "cuEventCreate");
        load(driver_.event_destroy, "cuEventDestroy_v2");
        load(driver_.event_record, "cuEventRecord");
        load(driver_.event_query, "cuEventQuery");
        load(driver_.event_synchronize, "cuEventSynchronize");
        load(driver_.memcpy_to_host, "cuMemcpyDtoHAsync_v2");
        load(driver_.memcpy_to_device, "cuMemcpyHtoDAsync_v2");
        load(driver_.memcpy_rectangle, "cuMemcpy2DAsync_v2");
        load(driver_.pointer_get_attribute, "cuPointerGetAttribute");
        load(driver_.memory_info, "cuMemGetInfo_v2");
        load(driver_.memory_allocate, "cuMemAlloc_v2");
        load(driver_.memory_free, "cuMemFree_v2");
        load(driver_.host_allocate, "cuMemHostAlloc");
        load(driver_.host_free, "cuMemFreeHost");
        load(driver_.host_register, "cuMemHostRegister_v2");
        load(driver_.host_unregister, "cuMemHostUnregister");
        load(driver_.module_load_data, "cuModuleLoadData");
        load(driver_.module_unload, "cuModuleUnload");
        load(driver_.module_get_function, "cuModuleGetFunction");
        load(driver_.launch_kernel, "cuLaunchKernel");
        available_ = complete && driver_.init(0) == kSuccess;
        load(driver_.stream_is_capturing, "cuStreamIsCapturing");
        load(driver_.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
        load(driver_.memory_free_async, "cuMemFreeAsync");
    }

    bool available() const { return available_; }
    const Driver& driver() const { return driver_; }

  private:
    Driver driver_{};
    bool available_ = false;
};

const Library& library() {
    static const Library instance;
    return instance;
}

std::string error_name(Result result) {
    const char* name = nullptr;
    if (driver().get_error_name(result, &name) != kSuccess || name == nullptr) {
        return "CUDA error " + std::to_string(result);
    }
    return name;
}

bool has_mapping(DevicePointer at) {
    int mapped = 0;
    if (driver().pointer_get_attribute(&mapped, kMapped, at) == kSuccess) return mapped != 0;
    // Nothing is allocated here, or the driver does not know this attribute: then memory is mapped
    // as long as it is allocated.
    unsigned type = 0;
    return driver().pointer_get_attribute(&type, kMemoryType, at) == kSuccess;
}

/// The mapping of a mapped address: of an older driver, which does not know it, one granule.
Mapping mapping_at(DevicePointer at) {
    DevicePointer base = 0;
    std::size_t size = 0;
    if (driver().pointer_get_attribute(&base, kMappingBase, at) == kSuccess &&
        driver().pointer_get_attribute(&size, kMappingSize, at) == kSuccess && base <= at &&
        at - base < size) {
        return {.begin = base, .end = base + size};
    }
    const DevicePointer granule = at / kGranule * kGranule;
    return {.begin = granule, .end = granule + kGranule};
}

}  // namespace

bool available() { return library().available(); }

const Driver& driver() { return library().driver(); }

int device_count() {
    int count = 0;
    if (!available() || driver().device_get_count(&count) != kSuccess) return 0;
    return count;
}

void check(Result result, const char* op) {
    if (result == kSuccess) return;
    throw Error(ErrorCode::cuda, 0, op, "", std::string(op) + " failed: " + error_name(result));
}

PrimaryContext::PrimaryContext(int ordinal) {
    check(driver().device_get(&device_, ordinal), "cuDeviceGet");
    check(driver().primary_context_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
}

// In destructors a call fails only when the process is ending and the driver is gone, or after the
// device has failed, which its user has been told by then.

PrimaryContext::~PrimaryContext() {
    for (auto* event : events_) {
        quietly(context_, [&] { return driver().event_destroy(event); });
    }
    static_cast<void>(driver().primary_context_release(device_));
}

EventHandle PrimaryContext::take_event() {
    {
        const std::scoped_lock lock(mutex_);
        if (!events_.empty()) {
            auto* const event = events_.back();
            events_.pop_back();
            return event;
        }
    }
    EventHandle event = nullptr;
    check(driver().event_create(&event, kEventDisableTiming), "cuEventCreate");
    return event;
}

void PrimaryContext::give_back(EventHandle event) noexcept {
    try {
        const std::scoped_lock lock(mutex_);
        events_.push_back(event);
    } catch (const std::bad_alloc&) {
        quietly(context_, [&] { return driver().event_destroy(event); });
    }
}

CurrentContext::CurrentContext(ContextHandle context) {
    check(driver().context_push(context), "cuCtxPushCurrent");
    capture_mode_ = exchange_capture_mode(kCaptureModeRelaxed);
}

CurrentContext::~CurrentContext() {
    exchange_capture_mode(capture_mode_);
    ContextHandle popped = nullptr;
    static_cast<void>(driver().context_pop(&popped));
}

bool is_capturing(StreamHandle stream) {
    if (driver().stream_is_capturing == nullptr) return false;
    int status = kCapturingNothing;
    const Result result = driver().stream_is_capturing(stream, &status);
    // This is the legacy stream, and a stream that synchronizes with it is being captured.
    if (result == kCaptureImplicit) return true;
    check(result, "cuStreamIsCapturing");
    return status != kCapturingNothing;
}

void require_not_capturing(StreamHandle stream) {
    if (!is_capturing(stream)) return;
    throw Error(ErrorCode::cuda, 0, "cuStreamIsCapturing", "",
                "a CUDA graph is being captured on this stream: take snapshots and restore before "
                "or after that");
}

bool is_mapped(DevicePointer pointer, std::uint64_t bytes, Mapping& known) {
    const DevicePointer end = pointer + bytes;
    for (DevicePointer at = pointer; at < end; at = known.end) {
        if (known.begin <= at && at < known.end) continue;
        if (!has_mapping(at)) return false;
        known = mapping_at(at);
    }
    return true;
}

int exchange_capture_mode(int mode) {
    if (driver().exchange_capture_mode != nullptr) {
        static_cast<void>(driver().exchange_capture_mode(&mode));
    }
    return mode;
}

bool is_refused_for_now(Result result) {
    return result == kCaptureUnsupported || result == kCaptureImplicit;
}

bool Patience::again(Result result) const {
    if (!is_refused_for_now(result) || std::chrono::steady_clock::now() >= end_) return false;
    std::this_thread::sleep_for(kPoll);
    return true;
}

Error capture_lasts() {
    return {ErrorCode::cuda, kCaptureUnsupported, "cuStreamBeginCapture", "",
            "a CUDA graph capture has not ended for minutes, and the driver refuses to wait for a "
            "device until it ends: end the capture"};
}

Kernel::Kernel(std::shared_ptr<PrimaryContext> context, const char* ptx, const char* name)
    : context_(std::move(context)) {
    check(driver().module_load_data(&module_, ptx), "cuModuleLoadData");
    const Result result = driver().module_get_function(&function_, module_, name);
    if (result != kSuccess) static_cast<void>(driver().module_unload(module_));
    check(result, "cuModuleGetFunction");
}

Kernel::~Kernel() {
    quietly(context_->handle(), [&] { return driver().module_unload(module_); });
}

PageLock::PageLock(std::shared_ptr<PrimaryContext> context, std::span<std::byte> memory)
    : context_(std::move(context)), memory_(memory) {
    constexpr const char* kOp = "cuMemHostRegister";
    const std::string what =
        "cannot page-lock " + std::to_string(memory.size()) + " bytes of the host cache: ";
    if (const int error = fault::hit_error(fault::Point::cuda_register); error != 0) {
        throw Error(ErrorCode::cuda, error, kOp, "", what + "injected fault");
    }
    const CurrentContext current(context_->handle());
    const Result result =
        driver().host_register(memory.data(), memory.size(), kHostPortable | kHostDeviceMap);
    if (result != kSuccess) throw Error(ErrorCode::cuda, 0, kOp, "", what + error_name(result));
}

PageLock::~PageLock() {
    // Needs a current context: without one it would fail, and the pages would stay locked.
    quietly(context_->handle(), [&] { return driver().host_unregister(memory_.data()); });
}

}  // namespace datastates::cuda
