#include "datastates/device_cache.hpp"

#include <algorithm>
#include <utility>

#include "datastates/error.hpp"
#include "datastates/fault.hpp"

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

DeviceSlab::~DeviceSlab() { pool_->release(pointer_, bytes_); }

std::uint64_t DeviceSlab::rounded(std::uint64_t bytes) {
    return (bytes + kPage - 1) / kPage * kPage;
}

std::optional<cuda::DevicePointer> DeviceSlab::take(std::uint64_t bytes) {
    const std::uint64_t whole = rounded(bytes);
    if (whole > bytes_ - taken_) return std::nullopt;
    return pointer_ + std::exchange(taken_, taken_ + whole);
}

DeviceImage::~DeviceImage() {
    // Only a job that was stopped comes here before: its sources must not be read any more.
    if (ready_) ready_->synchronize();
}

DevicePool::DevicePool(std::shared_ptr<CopyEngine> engine, std::uint64_t limit)
    : engine_(std::move(engine)), limit_(limit) {
    const auto& calls = driver();
    if (calls.pool_create == nullptr || calls.pool_destroy == nullptr ||
        calls.pool_allocate == nullptr || calls.pool_free == nullptr) {
        throw Error(ErrorCode::cuda, 0, "cuMemPoolCreate", "", "the driver has no memory pools");
    }
    const CurrentContext current(engine_->context());
    const cuda::PoolProperties properties{.location = engine_->ordinal()};
    check(calls.pool_create(&pool_, &properties), "cuMemPoolCreate");
}

DevicePool::~DevicePool() {
    quietly(engine_->context(), [&] { return driver().pool_destroy(pool_); });
}

std::uint64_t DevicePool::room() const {
    const CurrentContext current(engine_->context());
    std::size_t free = 0;
    std::size_t total = 0;
    check(driver().memory_info(&free, &total), "cuMemGetInfo");
    const std::scoped_lock lock(mutex_);
    return device_room(limit_, used_, free, total);
}

std::shared_ptr<DeviceSlab> DevicePool::allocate(std::uint64_t bytes) {
    if (fault::hit_error(fault::Point::cuda_pool) != 0) return nullptr;
    const CurrentContext current(engine_->context());
    cuda::DevicePointer pointer = 0;
    const cuda::Result result =
        driver().pool_allocate(&pointer, bytes, pool_, engine_->evacuation_stream());
    if (result != cuda::kSuccess) return nullptr;
    {
        const std::scoped_lock lock(mutex_);
        used_ += bytes;
    }
    return std::make_shared<DeviceSlab>(shared_from_this(), pointer, bytes);
}

void DevicePool::release(cuda::DevicePointer pointer, std::uint64_t bytes) {
    auto* const stream = engine_->evacuation_stream();
    quietly(engine_->context(), [&] { return driver().pool_free(pointer, stream); });
    bool last = false;
    {
        const std::scoped_lock lock(mutex_);
        used_ -= bytes;
        last = used_ == 0;
    }
    // A pool gives its memory back to the device in a synchronizing call; the stream is idle.
    if (last) engine_->drain(stream);
}

std::shared_ptr<DevicePool> DeviceCache::pool(CopyEngine& engine) {
    const std::scoped_lock lock(mutex_);
    const auto [found, fresh] = pools_.try_emplace(engine.ordinal());
    if (fresh) {
        try {
            found->second = std::make_shared<DevicePool>(engine.shared_from_this(), limit_);
        } catch (const Error&) {
            found->second = nullptr;  // no device cache there
        }
    }
    return found->second;
}

}  // namespace datastates
