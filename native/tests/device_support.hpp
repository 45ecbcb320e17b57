#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iostream>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "check.hpp"
#include "datastates/memory/cuda.hpp"
#include "datastates/plan.hpp"
#include "support.hpp"

/// Shared code of the tests that need a GPU.
namespace support {

constexpr std::size_t kBlock = std::size_t{1} << 20;

/// Device memory with a stream of its own, as in a training framework.
class DeviceMemory {
  public:
    explicit DeviceMemory(std::size_t bytes) {
        const datastates::cuda::CurrentContext current(context_.handle());
        datastates::cuda::check(datastates::cuda::driver().memory_allocate(&pointer_, bytes + 256),
                                "cuMemAlloc");
        datastates::cuda::check(datastates::cuda::driver().stream_create(
                                    &stream_, datastates::cuda::kStreamNonBlocking),
                                "cuStreamCreate");
    }
    ~DeviceMemory() {
        const datastates::cuda::CurrentContext current(context_.handle());
        datastates::cuda::driver().stream_synchronize(stream_);
        datastates::cuda::driver().stream_destroy(stream_);
        datastates::cuda::driver().memory_free(pointer_);
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    datastates::cuda::DevicePointer pointer() const { return pointer_; }
    datastates::cuda::StreamHandle stream() const { return stream_; }
    std::uint64_t stream_number() const { return reinterpret_cast<std::uint64_t>(stream_); }
    /// Copies in stream order. `bytes` must live until `synchronize`.
    void put(std::uint64_t offset, const Bytes& bytes) const {
        const datastates::cuda::CurrentContext current(context_.handle());
        datastates::cuda::check(datastates::cuda::driver().memcpy_to_device(
                                    pointer_ + offset, bytes.data(), bytes.size(), stream_),
                                "cuMemcpyHtoDAsync");
    }
    Bytes get(std::uint64_t offset, std::size_t size) const {
        Bytes bytes(size);
        const datastates::cuda::CurrentContext current(context_.handle());
        datastates::cuda::check(datastates::cuda::driver().memcpy_to_host(
                                    bytes.data(), pointer_ + offset, size, stream_),
                                "cuMemcpyDtoHAsync");
        synchronize();
        return bytes;
    }
    void synchronize() const {
        const datastates::cuda::CurrentContext current(context_.handle());
        datastates::cuda::check(datastates::cuda::driver().stream_synchronize(stream_),
                                "cuStreamSynchronize");
    }

  private:
    datastates::cuda::PrimaryContext context_{0};
    datastates::cuda::DevicePointer pointer_ = 0;
    datastates::cuda::StreamHandle stream_ = nullptr;
};

/// A write case whose sources are on the device; with `mixed`, every second one.
struct DeviceCase {
    WriteCase written;
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    datastates::Buffers buffers;

    DeviceCase(WriteCase made, bool mixed) : written(std::move(made)), buffers(written.buffers()) {
        for (std::size_t i = 0; i < written.sources.size(); ++i) {
            memory.push_back(std::make_unique<DeviceMemory>(written.sources[i].size()));
            if (mixed && i % 2 == 0) continue;
            memory[i]->put(0, written.sources[i]);
            memory[i]->synchronize();
            buffers.address[i] = memory[i]->pointer();
            buffers.device[i] = 0;
            buffers.stream[i] = memory[i]->stream_number();
        }
    }
};

/// A write case whose sources lie in one stretch of device memory, at odd addresses.
struct PackedCase {
    WriteCase written;
    DeviceMemory memory;
    datastates::Buffers buffers;

    PackedCase(WriteCase made, std::mt19937_64& random)
        : written(std::move(made)), memory(room(written)), buffers(written.buffers()) {
        Bytes image(room(written));
        std::size_t at = 0;
        for (std::size_t i = 0; i < written.sources.size(); ++i) {
            at += random() % kMostGap;
            std::ranges::copy(written.sources[i], image.begin() + static_cast<std::ptrdiff_t>(at));
            buffers.address[i] = memory.pointer() + at;
            buffers.device[i] = 0;
            buffers.stream[i] = memory.stream_number();
            at += written.sources[i].size();
        }
        memory.put(0, image);
        memory.synchronize();
    }
    /// The bytes of device memory in use.
    std::size_t bytes() const { return room(written); }

  private:
    static constexpr std::size_t kMostGap = 17;
    static std::size_t room(const WriteCase& made) {
        std::size_t bytes = made.sources.size() * kMostGap;
        for (const Bytes& source : made.sources) bytes += source.size();
        return bytes;
    }
};

/// Sources of 5 bytes, 2 MB, 4 MB and so on.
inline WriteCase large_case(std::mt19937_64& random, std::vector<std::uint8_t> eager) {
    std::vector<Bytes> sources;
    for (std::size_t i = 0; i < eager.size(); ++i) {
        sources.push_back(random_bytes(random, (i * 2000003) + 5));
    }
    return WriteCase::make(std::move(sources), std::move(eager), kBlock, 262144, random);
}

inline std::vector<std::pair<int, std::uint64_t>> streams_of(const DeviceCase& state) {
    std::vector<std::pair<int, std::uint64_t>> streams;
    for (const auto& memory : state.memory) streams.emplace_back(0, memory->stream_number());
    return streams;
}

/// Runs the tests. Without a GPU it says so and returns 77, which ctest shows as skipped.
inline int run_on_device(int argc, char** argv) {
    if (datastates::cuda::device_count() == 0) {
        std::cout << "SKIPPED: no CUDA device; NOTHING of the device path was tested" << "\n"
                  << std::flush;
        return 77;
    }
    return check::run(argc, argv);
}

}  // namespace support
