#include "datastates/copy_engine.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <utility>

#include "datastates/error.hpp"
#include "datastates/fault.hpp"

namespace datastates {
namespace {

using cuda::check;
using cuda::CurrentContext;
using cuda::driver;

/// For destructors: a call fails there only when the process is ending and the driver has gone, or
/// when the device has failed, which its user has been told already.
void ignore(cuda::Result /*result*/) {}

/// A call of that kind with its context current; the context itself may have gone, too.
template <typename Call>
void quietly(cuda::ContextHandle context, Call call) {
    if (driver().context_push(context) != cuda::kSuccess) return;
    ignore(call());
    cuda::ContextHandle popped = nullptr;
    ignore(driver().context_pop(&popped));
}

}  // namespace

Event::Event(std::shared_ptr<cuda::PrimaryContext> context, cuda::StreamHandle stream)
    : context_(std::move(context)) {
    const CurrentContext current(context_->handle());
    check(driver().event_create(&event_, cuda::kEventDisableTiming), "cuEventCreate");
    const cuda::Result result = driver().event_record(event_, stream);
    if (result != cuda::kSuccess) ignore(driver().event_destroy(event_));
    check(result, "cuEventRecord");
}

Event::~Event() {
    quietly(context_->handle(), [&] { return driver().event_destroy(event_); });
}

bool Event::passed() const {
    const CurrentContext current(context_->handle());
    const cuda::Result result = driver().event_query(event_);
    if (result == cuda::kNotReady) return false;
    check(result, "cuEventQuery");
    return true;
}

void Event::synchronize() const {
    quietly(context_->handle(), [&] { return driver().event_synchronize(event_); });
}

void Event::order_before(cuda::StreamHandle stream) const {
    check(driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

DeviceFingerprints::DeviceFingerprints(std::shared_ptr<CopyEngine> engine, std::byte* memory,
                                       std::size_t bytes, std::size_t count)
    : engine_(std::move(engine)), memory_(memory), bytes_(bytes), count_(count) {}

DeviceFingerprints::DeviceFingerprints(DeviceFingerprints&& other) noexcept
    : engine_(std::move(other.engine_)),
      memory_(std::exchange(other.memory_, nullptr)),
      bytes_(other.bytes_),
      count_(other.count_),
      used_(std::move(other.used_)) {}

DeviceFingerprints::~DeviceFingerprints() {
    if (memory_ == nullptr) return;
    const std::scoped_lock lock(engine_->mutex_);
    engine_->spares_.push_back({.memory = memory_, .bytes = bytes_, .used = std::move(used_)});
}

std::uint64_t DeviceFingerprints::at(std::size_t index) const {
    std::uint64_t sum = 0;
    const std::size_t sums = count_ * sizeof(fingerprint::DeviceRange);
    std::memcpy(&sum, memory_ + sums + (index * sizeof sum), sizeof sum);
    return sum;
}

CopyEngine::CopyEngine(int ordinal) : context_(std::make_shared<cuda::PrimaryContext>(ordinal)) {
    const CurrentContext current(context());
    check(driver().stream_create(&capture_stream_, cuda::kStreamNonBlocking), "cuStreamCreate");
    const cuda::Result result = driver().stream_create(&restore_stream_, cuda::kStreamNonBlocking);
    if (result != cuda::kSuccess) ignore(driver().stream_destroy(capture_stream_));
    check(result, "cuStreamCreate");
}

CopyEngine::~CopyEngine() {
    ignore(driver().context_push(context()));
    for (const auto& spare : spares_) {
        if (spare.used) spare.used->synchronize();
        ignore(driver().host_free(spare.memory));
    }
    if (module_ != nullptr) ignore(driver().module_unload(module_));
    ignore(driver().stream_destroy(capture_stream_));
    ignore(driver().stream_destroy(restore_stream_));
    cuda::ContextHandle popped = nullptr;
    ignore(driver().context_pop(&popped));
}

std::shared_ptr<Event> CopyEngine::record(cuda::StreamHandle stream) const {
    return std::make_shared<Event>(context_, stream);
}

void CopyEngine::wait(cuda::StreamHandle stream, const Event& event) const {
    const CurrentContext current(context());
    event.order_before(stream);
}

void CopyEngine::to_host(std::byte* host, cuda::DevicePointer device, std::size_t bytes,
                         cuda::StreamHandle stream) const {
    const CurrentContext current(context());
    check(driver().memcpy_to_host(host, device, bytes, stream), "cuMemcpyDtoHAsync");
}

void CopyEngine::to_device(cuda::DevicePointer device, const std::byte* host, std::size_t bytes,
                           cuda::StreamHandle stream) const {
    const CurrentContext current(context());
    check(driver().memcpy_to_device(device, host, bytes, stream), "cuMemcpyHtoDAsync");
}

void CopyEngine::drain(cuda::StreamHandle stream) const {
    const CurrentContext current(context());
    ignore(driver().stream_synchronize(stream));
}

CopyEngine::Spare CopyEngine::take_page_locked(std::size_t bytes) {
    // A kernel of a job that failed early may still be about to read its buffer.
    const auto usable = [&](const Spare& spare) {
        return spare.bytes >= bytes && (!spare.used || spare.used->passed());
    };
    const auto found = std::ranges::find_if(spares_, usable);
    if (found != spares_.end()) {
        Spare spare = std::move(*found);
        spares_.erase(found);
        return spare;
    }
    if (const int error = fault::hit_error(fault::Point::cuda_alloc); error != 0) {
        throw Error(ErrorCode::cuda, error, "cuMemHostAlloc", "",
                    "cuMemHostAlloc failed: injected fault");
    }
    void* memory = nullptr;
    check(driver().host_allocate(&memory, bytes, cuda::kHostPortable | cuda::kHostDeviceMap),
          "cuMemHostAlloc");
    return {.memory = static_cast<std::byte*>(memory), .bytes = bytes, .used = nullptr};
}

DeviceFingerprints CopyEngine::fingerprint(std::span<const fingerprint::DeviceRange> ranges,
                                           cuda::StreamHandle stream) {
    const CurrentContext current(context());
    Spare buffer{};
    {
        const std::scoped_lock lock(mutex_);
        if (kernel_ == nullptr) {
            check(driver().module_load_data(&module_, fingerprint::kKernelPtx), "cuModuleLoadData");
            check(driver().module_get_function(&kernel_, module_, "datastates_fingerprint"),
                  "cuModuleGetFunction");
        }
        buffer = take_page_locked(ranges.size() *
                                  (sizeof(fingerprint::DeviceRange) + sizeof(std::uint64_t)));
    }
    DeviceFingerprints launched(shared_from_this(), buffer.memory, buffer.bytes, ranges.size());
    std::memcpy(buffer.memory, ranges.data(), ranges.size_bytes());
    // The device reads and writes page-locked host memory at the host's own addresses: what is told
    // and answered here is a few KiB, not worth copies.
    auto told = reinterpret_cast<std::uint64_t>(buffer.memory);
    std::uint64_t answered = told + ranges.size_bytes();
    auto count = static_cast<unsigned>(ranges.size());
    std::array<void*, 3> parameters = {&told, &answered, &count};
    const unsigned blocks =
        (count + fingerprint::kRangesPerKernelBlock - 1) / fingerprint::kRangesPerKernelBlock;
    check(driver().launch_kernel(kernel_, blocks, 1, 1, fingerprint::kKernelThreads, 1, 1, 0,
                                 stream, parameters.data(), nullptr),
          "cuLaunchKernel");
    launched.used_ = record(stream);
    return launched;
}

std::shared_ptr<CopyEngine> CopyEngines::at(int device) {
    const std::scoped_lock lock(mutex_);
    auto& engine = engines_[device];
    if (engine) return engine;
    if (device < 0 || device >= cuda::device_count()) {
        throw Error(ErrorCode::cuda, 0, "cuDeviceGet", "",
                    "no CUDA device " + std::to_string(device) + " (found " +
                        std::to_string(cuda::device_count()) + ")");
    }
    auto made = std::make_shared<CopyEngine>(device);
    cache_.pin(made->primary_context());
    engine = std::move(made);
    return engine;
}

}  // namespace datastates
