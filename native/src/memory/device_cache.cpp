#include "datastates/memory/device_cache.hpp"

#include <algorithm>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"

namespace datastates {
namespace {

using cuda::check;
using cuda::CurrentContext;
using cuda::driver;
using cuda::quietly;

constexpr std::uint64_t kLeastMargin = std::uint64_t{1} << 30;
constexpr std::uint64_t kMarginShare = 20;
constexpr std::uint64_t kPage = 4096;

}  // namespace

std::uint64_t device_room(std::uint64_t limit, std::uint64_t used, std::uint64_t free,
                          std::uint64_t total) {
    const std::uint64_t margin = std::max(kLeastMargin, total / kMarginShare);
    return std::min(limit - std::min(limit, used), free - std::min(free, margin));
}

DeviceSlab::~DeviceSlab() {
    if (bytes_ > 0) share_->release(pointer_, bytes_);
}

std::uint64_t DeviceSlab::rounded(std::uint64_t bytes) {
    return (bytes + kPage - 1) / kPage * kPage;
}

std::optional<cuda::DevicePointer> DeviceSlab::take(std::uint64_t bytes) {
    const std::uint64_t whole = rounded(bytes);
    if (whole > bytes_ - taken_) return std::nullopt;
    return pointer_ + std::exchange(taken_, taken_ + whole);
}

DeviceImage::~DeviceImage() {
    // Only a stopped job gets here before the copy has finished; its sources must not be read
    // later.
    if (ready_) ready_->synchronize();
}

std::uint64_t DeviceShare::room() const {
    const CurrentContext current(engine_->context());
    std::size_t free = 0;
    std::size_t total = 0;
    check(driver().memory_info(&free, &total), "cuMemGetInfo");
    const std::scoped_lock lock(mutex_);
    return device_room(limit_, used_, free, total);
}

std::shared_ptr<DeviceSlab> DeviceShare::allocate(std::uint64_t bytes) {
    if (fault::hit_error(fault::Point::cuda_slab) != 0) return nullptr;
    // Made before the memory, so that nothing can throw while the memory has no owner.
    auto slab = std::make_shared<DeviceSlab>(shared_from_this());
    const CurrentContext current(engine_->context());
    cuda::DevicePointer pointer = 0;
    if (driver().memory_allocate(&pointer, bytes) != cuda::kSuccess) return nullptr;
    slab->hold(pointer, bytes);
    const std::scoped_lock lock(mutex_);
    used_ += bytes;
    return slab;
}

void DeviceShare::release(cuda::DevicePointer pointer, std::uint64_t bytes) {
    // Freed behind all copies out of it. cuMemFree would wait for the training's enqueued work and
    // block further enqueueing meanwhile. cuMemFreeAsync may free memory of cuMemAlloc: see the
    // CUDA C++ Programming Guide, "Stream Ordered Memory Allocator".
    auto* const stream = engine_->capture_stream();
    quietly(engine_->context(), [&] { return driver().memory_free_async(pointer, stream); });
    if (!engine_->drain(stream)) return;  // not freed for certain: still counts as used
    const std::scoped_lock lock(mutex_);
    used_ -= bytes;
}

std::shared_ptr<DeviceShare> DeviceCache::share(CopyEngine& engine) {
    const std::scoped_lock lock(mutex_);
    const auto [found, fresh] = shares_.try_emplace(engine.ordinal());
    if (fresh && engine.frees_in_order()) {
        found->second = std::make_shared<DeviceShare>(engine.shared_from_this(), limit_);
    }
    return found->second;
}

}  // namespace datastates
