#include "datastates/memory/copy_engine.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"

namespace datastates {
namespace {

using cuda::check;
using cuda::CurrentContext;
using cuda::driver;
using cuda::quietly;

// The smallest kernel memory. Sizes are rounded up to powers of two, so that they can be reused.
constexpr std::size_t kLeastSpare = std::size_t{16} << 10;
// The pieces of a kernel of whole fingerprints, one for each warp: their least size, and about how
// many there are at most. More would not be read faster, as a GPU runs some thousand warps at a
// time.
constexpr std::uint64_t kLeastPiece = std::uint64_t{64} << 10;
constexpr std::uint64_t kMostPieces = 8192;
// Up to this many chunks, each gets a block of its own, so that a few are hashed by the whole
// device.
constexpr unsigned kFewChunks = 1024;

}  // namespace

Event::Event(std::shared_ptr<cuda::PrimaryContext> context, cuda::StreamHandle stream,
             std::shared_ptr<const void> keep)
    : context_(std::move(context)), keep_(std::move(keep)) {
    const CurrentContext current(context_->handle());
    cuda::require_not_capturing(stream);  // the event would become part of the graph
    event_ = context_->take_event();
    const cuda::Result result = driver().event_record(event_, stream);
    if (result != cuda::kSuccess) context_->give_back(event_);
    check(result, "cuEventRecord");
}

Event::~Event() { context_->give_back(event_); }

bool Event::passed() const {
    const CurrentContext current(context_->handle());
    const cuda::Result result = driver().event_query(event_);
    if (result == cuda::kNotReady) return false;
    check(result, "cuEventQuery");
    return true;
}

bool Event::synchronize() const {
    return quietly(context_->handle(), [&] { return driver().event_synchronize(event_); });
}

void Event::order_before(cuda::StreamHandle stream) const {
    check(driver().stream_wait_event(stream, event_, 0), "cuStreamWaitEvent");
}

KernelMemory::KernelMemory(std::shared_ptr<CopyEngine> engine, std::byte* memory, std::size_t bytes)
    : engine_(std::move(engine)), memory_(memory), bytes_(bytes) {}

KernelMemory::KernelMemory(KernelMemory&& other) noexcept
    : engine_(std::move(other.engine_)),
      memory_(std::exchange(other.memory_, nullptr)),
      bytes_(other.bytes_),
      used_(std::move(other.used_)) {}

KernelMemory::~KernelMemory() {
    if (memory_ == nullptr) return;
    const std::scoped_lock lock(engine_->mutex_);
    engine_->spares_.push_back({.memory = memory_, .bytes = bytes_, .used = std::move(used_)});
}

std::uint64_t DeviceDigests::sum(std::size_t piece, std::size_t run) const {
    std::uint64_t sum = 0;
    const std::size_t sums = pieces() * sizeof(fingerprint::DeviceWords);
    const std::size_t index = (run * pieces()) + piece;
    std::memcpy(&sum, memory_.data() + sums + (index * sizeof sum), sizeof sum);
    return sum;
}

std::uint64_t DeviceDigests::at(std::size_t range) const {
    std::uint64_t total = 0;
    for (auto piece = first_[range]; piece < first_[range + 1]; ++piece) total += sum(piece, 0);
    return total;
}

bool DeviceDigests::changed(std::size_t range) const {
    for (auto piece = first_[range]; piece < first_[range + 1]; ++piece) {
        if (sum(piece, 0) != sum(piece, 1)) return true;
    }
    return false;
}

void DeviceDigests::leave_out(std::size_t range) {
    const fingerprint::DeviceWords nothing{.address = 0, .nbytes = 0};
    for (auto piece = first_[range]; piece < first_[range + 1]; ++piece) {
        std::memcpy(memory_.data() + (piece * sizeof nothing), &nothing, sizeof nothing);
    }
}

std::span<const hash::Hash> DeviceHashes::all() const {
    const std::byte* hashes = memory_.data() + (chunks_ * sizeof(hash::DeviceChunk));
    return {reinterpret_cast<const hash::Hash*>(hashes), chunks_};
}

CopyEngine::CopyEngine(int ordinal)
    : ordinal_(ordinal), context_(std::make_shared<cuda::PrimaryContext>(ordinal)) {
    const CurrentContext current(context());
    reaches_host_ = has(cuda::kHostPointersForRegisteredMemory);
    frees_in_order_ = driver().memory_free_async != nullptr && has(cuda::kMemoryPoolsSupported);
    try {
        make_streams();
    } catch (...) {
        destroy_streams();
        throw;
    }
}

CopyEngine::~CopyEngine() {
    // The kernels' memory and code must stay until the kernels have finished.
    for (const auto& spare : spares_) {
        if (spare.used && !spare.used->synchronize()) continue;
        quietly(context(), [&] { return driver().host_free(spare.memory); });
    }
    kernels_.reset();
    hash_kernel_.reset();
    destroy_streams();
}

CopyEngine::Kernels::Kernels(const std::shared_ptr<cuda::PrimaryContext>& context)
    : digest(context, fingerprint::whole_ptx().c_str(), "datastates_whole"),
      gather(context, gather::kernel_ptx().c_str(), "datastates_gather") {}

bool CopyEngine::has(int attribute) const {
    int value = 0;
    const cuda::Result result =
        driver().device_get_attribute(&value, attribute, context_->device());
    return result == cuda::kSuccess && value != 0;
}

void CopyEngine::make_streams() {
    for (auto* stream : {&capture_stream_, &restore_stream_, &evacuation_stream_, &hash_stream_}) {
        check(driver().stream_create(stream, cuda::kStreamNonBlocking), "cuStreamCreate");
    }
}

void CopyEngine::destroy_streams() const {
    for (auto* stream : {capture_stream_, restore_stream_, evacuation_stream_, hash_stream_}) {
        if (stream == nullptr) continue;
        quietly(context(), [&] { return driver().stream_destroy(stream); });
    }
}

void CopyEngine::prepare() {
    const CurrentContext current(context());
    const std::scoped_lock lock(mutex_);
    static_cast<void>(kernels());
}

std::shared_ptr<Event> CopyEngine::record(cuda::StreamHandle stream,
                                          std::shared_ptr<const void> keep) const {
    return std::make_shared<Event>(context_, stream, std::move(keep));
}

void CopyEngine::wait(cuda::StreamHandle stream, const Event& event) const {
    const CurrentContext current(context());
    if (cuda::is_capturing(stream)) {
        if (!event.synchronize()) throw cuda::capture_lasts();
    } else {
        event.order_before(stream);
    }
}

void CopyEngine::require_not_capturing(cuda::StreamHandle stream) const {
    const CurrentContext current(context());
    cuda::require_not_capturing(stream);
}

bool CopyEngine::has_memory(cuda::DevicePointer pointer, std::uint64_t bytes,
                            cuda::Mapping& known) const {
    const CurrentContext current(context());
    return cuda::is_mapped(pointer, bytes, known);
}

void CopyEngine::to_host(std::byte* host, cuda::DevicePointer device, std::size_t bytes,
                         cuda::StreamHandle stream) const {
    const CurrentContext current(context());
    check(driver().memcpy_to_host(host, device, bytes, stream), "cuMemcpyDtoHAsync");
}

void CopyEngine::to_device(const RowCopy& rows, cuda::StreamHandle stream) const {
    const CurrentContext current(context());
    const bool dense = rows.device_step == rows.length && rows.host_step == rows.length;
    if (rows.count == 1 || dense) {
        check(driver().memcpy_to_device(rows.device, rows.host, rows.length * rows.count, stream),
              "cuMemcpyHtoDAsync");
        return;
    }
    if (std::max(rows.device_step, rows.host_step) > cuda::kMaxPitch) {
        for (std::size_t i = 0; i < rows.count; ++i) {
            check(driver().memcpy_to_device(rows.device + (i * rows.device_step),
                                            rows.host + (i * rows.host_step), rows.length, stream),
                  "cuMemcpyHtoDAsync");
        }
        return;
    }
    const cuda::RectangleCopy copy{.source_memory = cuda::kHostMemory,
                                   .source_host = rows.host,
                                   .source_step = rows.host_step,
                                   .dest_memory = cuda::kDeviceMemory,
                                   .dest_device = rows.device,
                                   .dest_step = rows.device_step,
                                   .width = rows.length,
                                   .height = rows.count};
    check(driver().memcpy_rectangle(&copy, stream), "cuMemcpy2DAsync");
}

bool CopyEngine::drain(cuda::StreamHandle stream) const {
    return quietly(context(), [&] { return driver().stream_synchronize(stream); });
}

const CopyEngine::Kernels& CopyEngine::kernels() {
    if (!kernels_) kernels_ = std::make_unique<const Kernels>(context_);
    return *kernels_;
}

KernelMemory CopyEngine::borrow(std::size_t bytes) {
    const std::scoped_lock lock(mutex_);
    // Take the smallest that fits, so that large ones are left for a gate and it allocates none.
    auto found = spares_.end();
    for (auto spare = spares_.begin(); spare != spares_.end(); ++spare) {
        if (spare->bytes < bytes || (found != spares_.end() && found->bytes <= spare->bytes)) {
            continue;
        }
        // A kernel may still use it.
        if (!spare->used || spare->used->passed()) found = spare;
    }
    if (found != spares_.end()) {
        Spare spare = std::move(*found);
        spares_.erase(found);
        return {shared_from_this(), spare.memory, spare.bytes};
    }
    if (const int error = fault::hit_error(fault::Point::cuda_alloc); error != 0) {
        throw Error(ErrorCode::cuda, error, "cuMemHostAlloc", "",
                    "cuMemHostAlloc failed: injected fault");
    }
    const std::size_t rounded = std::bit_ceil(std::max(bytes, kLeastSpare));
    void* memory = nullptr;
    check(driver().host_allocate(&memory, rounded, cuda::kHostPortable | cuda::kHostDeviceMap),
          "cuMemHostAlloc");
    return {shared_from_this(), static_cast<std::byte*>(memory), rounded};
}

/// Launches a kernel and returns the event behind it. REQUIRES: the context is current.
std::shared_ptr<Event> CopyEngine::launch(const cuda::Kernel& kernel, unsigned blocks,
                                          unsigned threads, std::span<void*> parameters,
                                          KernelMemory& memory, cuda::StreamHandle stream) {
    check(driver().launch_kernel(kernel.function(), blocks, 1, 1, threads, 1, 1, 0, stream,
                                 parameters.data(), nullptr),
          "cuLaunchKernel");
    try {
        memory.used_ = record(stream);
        return memory.used_;
    } catch (...) {
        drain(stream);  // without an event, wait before the memory is lent again
        throw;
    }
}

std::shared_ptr<Event> CopyEngine::gather(std::span<const gather::Range> ranges,
                                          cuda::StreamHandle stream, unsigned max_blocks) {
    const CurrentContext current(context());
    const cuda::Kernel* kernel = nullptr;
    {
        const std::scoped_lock lock(mutex_);
        kernel = &kernels().gather;
    }
    KernelMemory memory = borrow(ranges.size_bytes());
    std::memcpy(memory.data(), ranges.data(), ranges.size_bytes());
    std::uint64_t told = memory.device_address();
    auto count = static_cast<unsigned>(ranges.size());
    std::array<void*, 2> parameters = {&told, &count};
    const unsigned blocks = std::min(
        max_blocks, (count + gather::kWarpsPerKernelBlock - 1) / gather::kWarpsPerKernelBlock);
    return launch(*kernel, blocks, gather::kKernelThreads, parameters, memory, stream);
}

DeviceDigests CopyEngine::digest(std::span<const fingerprint::DeviceWords> ranges,
                                 cuda::StreamHandle stream) {
    const CurrentContext current(context());
    std::uint64_t all = 0;
    for (const auto& range : ranges) all += range.nbytes;
    // Pieces of some hundred kilobytes keep all warps busy; few pieces are quickly told.
    const std::uint64_t piece_bytes =
        std::max(kLeastPiece, all / kMostPieces / kLeastPiece * kLeastPiece);
    std::vector<std::size_t> first;
    first.reserve(ranges.size() + 1);
    std::size_t pieces = 0;
    for (const auto& range : ranges) {
        first.push_back(pieces);
        pieces += (range.nbytes + piece_bytes - 1) / piece_bytes;
    }
    first.push_back(pieces);
    DeviceDigests digests(
        borrow(pieces * (sizeof(fingerprint::DeviceWords) + (2 * sizeof(std::uint64_t)))),
        std::move(first));
    std::byte* to = digests.memory_.data();
    for (const auto& [address, nbytes, position] : ranges) {
        for (std::uint64_t at = 0; at < nbytes; at += piece_bytes) {
            const fingerprint::DeviceWords piece{.address = address + at,
                                                 .nbytes = std::min(piece_bytes, nbytes - at),
                                                 .position = position + (at / fingerprint::kWord)};
            std::memcpy(to, &piece, sizeof piece);
            to += sizeof piece;
        }
    }
    launch_digest(digests, 0, stream);
    return digests;
}

void CopyEngine::digest_again(DeviceDigests& digests, cuda::StreamHandle stream) {
    const CurrentContext current(context());
    launch_digest(digests, 1, stream);
}

void CopyEngine::launch_digest(DeviceDigests& digests, std::size_t run, cuda::StreamHandle stream) {
    const cuda::Kernel* kernel = nullptr;
    {
        const std::scoped_lock lock(mutex_);
        kernel = &kernels().digest;
    }
    const std::size_t pieces = digests.pieces();
    std::uint64_t told = digests.memory_.device_address();
    std::uint64_t answered =
        told + (pieces * sizeof(fingerprint::DeviceWords)) + (run * pieces * sizeof(std::uint64_t));
    auto count = static_cast<unsigned>(pieces);
    std::array<void*, 3> parameters = {&told, &answered, &count};
    const unsigned blocks = std::max(
        1U, (count + fingerprint::kRangesPerKernelBlock - 1) / fingerprint::kRangesPerKernelBlock);
    digests.done_ =
        launch(*kernel, blocks, fingerprint::kKernelThreads, parameters, digests.memory_, stream);
}

DeviceHashes CopyEngine::hash(std::span<const hash::DeviceChunk> chunks) {
    const CurrentContext current(context());
    {
        const std::scoped_lock lock(mutex_);
        if (!hash_kernel_) {
            hash_kernel_ =
                std::make_unique<const cuda::Kernel>(context_, hash::kKernelPtx, "datastates_hash");
        }
    }
    DeviceHashes hashes(borrow(chunks.size_bytes() + (chunks.size() * sizeof(hash::Hash))),
                        chunks.size());
    std::memcpy(hashes.memory_.data(), chunks.data(), chunks.size_bytes());
    std::uint64_t told = hashes.memory_.device_address();
    std::uint64_t answered = told + chunks.size_bytes();
    auto count = static_cast<unsigned>(chunks.size());
    std::array<void*, 3> parameters = {&told, &answered, &count};
    const unsigned full = (count + hash::kChunksPerKernelBlock - 1) / hash::kChunksPerKernelBlock;
    const unsigned blocks = std::max(full, std::min(count, kFewChunks));
    hashes.done_ = launch(*hash_kernel_, blocks, hash::kKernelThreads, parameters, hashes.memory_,
                          hash_stream_);
    return hashes;
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
