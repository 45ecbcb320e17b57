#include "datastates/shim/cuda.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <iostream>
#include <thread>

#include "check.hpp"
#include "datastates/copy_engine.hpp"
#include "datastates/error.hpp"
#include "datastates/executor.hpp"
#include "datastates/fingerprint.hpp"
#include "datastates/gather.hpp"
#include "support.hpp"

/// What needs a GPU. Without one it says so and exits with 77, which ctest shows as skipped.
using namespace datastates;
using support::Bytes;
using support::ReadCase;
using support::WriteCase;

namespace {

constexpr std::size_t kBlock = std::size_t{1} << 20;

/// Device memory with a stream of its own, as a training framework has them.
class DeviceMemory {
  public:
    explicit DeviceMemory(std::size_t bytes) {
        const cuda::CurrentContext current(context_.handle());
        cuda::check(cuda::driver().memory_allocate(&pointer_, bytes + 256), "cuMemAlloc");
        cuda::check(cuda::driver().stream_create(&stream_, cuda::kStreamNonBlocking),
                    "cuStreamCreate");
    }
    ~DeviceMemory() {
        const cuda::CurrentContext current(context_.handle());
        cuda::driver().stream_synchronize(stream_);
        cuda::driver().stream_destroy(stream_);
        cuda::driver().memory_free(pointer_);
    }
    DeviceMemory(const DeviceMemory&) = delete;
    DeviceMemory& operator=(const DeviceMemory&) = delete;

    cuda::DevicePointer pointer() const { return pointer_; }
    cuda::StreamHandle stream() const { return stream_; }
    std::uint64_t stream_number() const { return reinterpret_cast<std::uint64_t>(stream_); }
    /// In stream order; `bytes` must live until `synchronize`.
    void put(std::uint64_t offset, const Bytes& bytes) const {
        const cuda::CurrentContext current(context_.handle());
        cuda::check(
            cuda::driver().memcpy_to_device(pointer_ + offset, bytes.data(), bytes.size(), stream_),
            "cuMemcpyHtoDAsync");
    }
    Bytes get(std::uint64_t offset, std::size_t size) const {
        Bytes bytes(size);
        const cuda::CurrentContext current(context_.handle());
        cuda::check(cuda::driver().memcpy_to_host(bytes.data(), pointer_ + offset, size, stream_),
                    "cuMemcpyDtoHAsync");
        synchronize();
        return bytes;
    }
    void synchronize() const {
        const cuda::CurrentContext current(context_.handle());
        cuda::check(cuda::driver().stream_synchronize(stream_), "cuStreamSynchronize");
    }

  private:
    cuda::PrimaryContext context_{0};
    cuda::DevicePointer pointer_ = 0;
    cuda::StreamHandle stream_ = nullptr;
};

/// A write case whose sources live on the device, or every second one there.
struct DeviceCase {
    WriteCase written;
    std::vector<std::unique_ptr<DeviceMemory>> memory;
    Buffers buffers;

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

WriteCase large_case(std::mt19937_64& random, std::vector<std::uint8_t> eager) {
    std::vector<Bytes> sources;
    for (std::size_t i = 0; i < eager.size(); ++i) {
        sources.push_back(support::random_bytes(random, (i * 2000003) + 5));
    }
    return WriteCase::make(std::move(sources), std::move(eager), kBlock, 262144, random);
}

/// Restores a written case over zeros, from the page cache or from the device that holds the file.
void check_restored(Executor& executor, const std::string& path, const DeviceCase& state,
                    bool cached) {
    ReadCase read = ReadCase::make(state.written, kBlock - 8192, 0);
    Buffers dests = read.buffers();
    for (std::size_t i = 0; i < dests.address.size(); ++i) {
        if (state.buffers.device[i] < 0) continue;
        const Bytes zeros(state.written.sources[i].size());
        state.memory[i]->put(0, zeros);
        state.memory[i]->synchronize();
        dests.address[i] = state.buffers.address[i];
        dests.device[i] = 0;
        dests.stream[i] = state.buffers.stream[i];
    }
    const auto job = executor.submit_read(path, read.plan, dests);
    CHECK(job->wait());
    const ReadStats stats = job->stats();
    if (stats.direct && !cached) CHECK_EQ(stats.cached_bytes, 0U);
    CHECK_EQ(support::bytes_of(job->timeline(), Stage::copy),
             stats.bytes_needed - stats.in_place_bytes);
    for (std::size_t i = 0; i < dests.address.size(); ++i) {
        const Bytes& source = state.written.sources[i];
        const bool same = dests.device[i] < 0
                              ? std::equal(source.begin(), source.end(), read.dests[i].data())
                              : state.memory[i]->get(0, source.size()) == source;
        CHECK(same);
    }
}

}  // namespace

TEST(kernel_equals_host_function) {
    std::mt19937_64 random(1);
    HostCache cache(kBlock, kBlock);
    CopyEngines engines(cache);
    const auto engine = engines.at(0);
    const DeviceMemory memory(1 << 20);
    const Bytes data = support::random_bytes(random, 1 << 20);
    memory.put(0, data);
    std::vector<fingerprint::DeviceRange> ranges;
    std::vector<std::uint64_t> expected;
    for (int i = 0; i < 1000; ++i) {
        const std::uint64_t offset = random() % 4096;
        const std::uint64_t nbytes = random() % (i % 2 == 0 ? 1200 : 1000000);
        ranges.push_back({.address = memory.pointer() + offset, .nbytes = nbytes});
        expected.push_back(fingerprint::of(data.data() + offset, nbytes));
    }
    const DeviceFingerprints found = engine->fingerprint(ranges, memory.stream());
    memory.synchronize();
    for (std::size_t i = 0; i < ranges.size(); ++i) CHECK_EQ(found.at(i), expected[i]);
}

TEST(gathers_every_length_and_alignment) {
    std::mt19937_64 random(7);
    HostCache cache(2 * kBlock, kBlock);
    CopyEngines engines(cache);
    const auto engine = engines.at(0);
    cache.reserve(cache.bytes());
    const auto block = cache.acquire([] { return false; });
    CHECK(block->page_locked());
    CHECK(engine->reaches_host());
    const DeviceMemory from(kBlock);
    const DeviceMemory image(kBlock);
    const Bytes data = support::random_bytes(random, kBlock);
    from.put(0, data);
    from.synchronize();
    for (const bool by_image : {false, true}) {
        std::ranges::fill(block->memory(), std::byte{0});
        Bytes expected(kBlock);
        image.put(0, expected);
        image.synchronize();
        auto* const host = block->memory().data();
        const std::uint64_t to = by_image ? image.pointer() : reinterpret_cast<std::uint64_t>(host);
        std::vector<gather::Range> ranges;
        std::size_t at = 0;
        for (;;) {
            static constexpr std::size_t kAlignments[] = {1, 2, 4, 8, 16};
            const std::size_t align = kAlignments[random() % 5];
            at = ((at + align - 1) / align * align) + (random() % 3 == 0 ? align : 0);
            const std::size_t length = random() % (random() % 4 == 0 ? 40000 : 300);
            const std::size_t source = random() % 5000 / align * align;
            if (at + length > kBlock) break;
            gather::add(ranges, to + at, from.pointer() + source, length);
            std::copy_n(data.begin() + static_cast<std::ptrdiff_t>(source), length,
                        expected.begin() + static_cast<std::ptrdiff_t>(at));
            at += length;
        }
        CHECK(ranges.size() > 100);
        engine->gather(ranges, engine->capture_stream());
        engine->record(engine->capture_stream())->synchronize();
        CHECK(by_image ? image.get(0, kBlock) == expected
                       : std::ranges::equal(block->memory(), expected));
    }
}

TEST(captures_thousands_of_small_sources) {
    std::mt19937_64 random(8);
    const support::TempDir dir;
    for (const bool page_locked : {true, false}) {
        const support::FaultScope scope;
        if (!page_locked) fault::arm("cuda_register", "fail", ENOMEM, 1, 0);
        const auto executor = support::make_executor({"pwrite", false}, 3, kBlock);
        const DeviceMemory memory(4 << 20);
        std::vector<Bytes> sources;
        std::vector<std::uint8_t> eager;
        for (int i = 0; i < 3000; ++i) {
            sources.push_back(support::random_bytes(random, random() % 1300));
            eager.push_back(static_cast<std::uint8_t>(random() % 20 == 0));
        }
        const WriteCase written =
            WriteCase::make(std::move(sources), std::move(eager), kBlock, 262144, random);
        Buffers buffers = written.buffers();
        std::uint64_t at = 0;
        for (std::size_t i = 0; i < written.sources.size(); ++i) {
            memory.put(at, written.sources[i]);
            buffers.address[i] = memory.pointer() + at;
            buffers.device[i] = 0;
            buffers.stream[i] = memory.stream_number();
            at += written.sources[i].size() + (random() % 17);
        }
        const std::string path = dir / (page_locked ? "locked" : "pageable");
        const auto job = executor->submit_write(path, written.plan, buffers);
        CHECK(job->wait_captured());
        CHECK_EQ(executor->pinned(), page_locked);
        CHECK(job->torn().empty());
        job->finish({});
        CHECK(support::read_file(path) == written.expected);
        memory.synchronize();
    }
}

TEST(captures_and_restores_more_than_the_cache) {
    std::mt19937_64 random(2);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        for (const bool mixed : {false, true}) {
            for (const std::size_t blocks : {1, 2, 3, 64}) {
                const auto executor = support::make_executor(setup, blocks, kBlock);
                DeviceCase state(large_case(random, {0, 1, 0, 0, 1, 0}), mixed);
                const std::string path = dir / (std::to_string(blocks) + (mixed ? "m" : "d"));
                const auto job = executor->submit_write(path, state.written.plan, state.buffers);
                CHECK(job->wait_captured());
                CHECK(executor->pinned());
                CHECK(job->torn().empty());
                job->finish({});
                CHECK(support::read_file(path) == state.written.expected);
                const auto crcs = job->source_crcs();
                for (std::size_t i = 0; i < crcs.size(); ++i) {
                    CHECK_EQ(crcs[i], crc32(0, state.written.sources[i]));
                }

                std::uint64_t on_device = 0;
                for (std::size_t i = 0; i < crcs.size(); ++i) {
                    if (state.buffers.device[i] >= 0) on_device += state.written.sources[i].size();
                }
                CHECK_EQ(support::bytes_of(job->timeline(), Stage::checksum), on_device);
                check_restored(*executor, path, state, true);
                support::drop_cache(path);
                check_restored(*executor, path, state, false);
            }
        }
    }
}

TEST(gated_streams_may_overwrite) {
    std::mt19937_64 random(3);
    for (const std::size_t blocks : {2, 64}) {
        const support::TempDir dir;
        const auto executor = support::make_executor({"pwrite", true}, blocks, kBlock);
        for (int round = 0; round < 5; ++round) {
            DeviceCase state(large_case(random, {1, 0, 0, 0, 0}), false);
            const std::string path = dir / std::to_string(round);
            const auto job = executor->submit_write(path, state.written.plan, state.buffers);
            std::vector<std::pair<int, std::uint64_t>> streams;
            for (const auto& memory : state.memory)
                streams.emplace_back(0, memory->stream_number());
            CHECK(job->gate(streams));
            std::vector<Bytes> zeros;
            for (std::size_t i = 0; i < state.memory.size(); ++i) {
                zeros.emplace_back(state.written.sources[i].size());
                state.memory[i]->put(0, zeros.back());
            }
            job->finish({});
            CHECK(job->torn().empty());
            CHECK(support::read_file(path) == state.written.expected);
            for (const auto& memory : state.memory) memory->synchronize();
        }
    }
}

TEST(torn_device_sources_are_named) {
    std::mt19937_64 random(4);
    const support::TempDir dir;
    const support::FaultScope scope;
    const auto executor = support::make_executor({"pwrite", false}, 1, kBlock);
    DeviceCase state(large_case(random, {0, 0, 0, 0}), false);
    state.buffers.witness = {1, 1, 0, 1};
    fault::arm("write", "delay", 300, 1, 1);
    const auto job = executor->submit_write(dir / "f", state.written.plan, state.buffers);
    std::vector<Bytes> zeros(4);
    for (const std::size_t i : {2, 3}) {  // no gate
        zeros[i].resize(state.written.sources[i].size());
        state.memory[i]->put(0, zeros[i]);
        state.memory[i]->synchronize();
    }
    CHECK(job->wait_captured());
    CHECK(job->torn() == std::vector<int>{3});
    job->finish({});
}

TEST(many_jobs_and_aborts) {
    std::mt19937_64 random(5);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        for (int round = 0; round < 10; ++round) {
            const std::string name = std::to_string(round);
            DeviceCase first(large_case(random, {0, 1, 0, 0}), true);
            DeviceCase second(large_case(random, {1, 0, 1, 0}), false);
            auto a = executor->submit_write(dir / name, first.written.plan, first.buffers);
            const auto b =
                executor->submit_write(dir / (name + "b"), second.written.plan, second.buffers);
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
            a->abort();
            b->finish({});
            CHECK(support::read_file(dir / (name + "b")) == second.written.expected);
        }
    }
}

namespace {

std::vector<std::pair<int, std::uint64_t>> streams_of(const DeviceCase& state) {
    std::vector<std::pair<int, std::uint64_t>> streams;
    for (const auto& memory : state.memory) streams.emplace_back(0, memory->stream_number());
    return streams;
}

/// What a training step does after the gate. The zeros must live until `synchronize`.
std::vector<Bytes> overwrite(const DeviceCase& state) {
    std::vector<Bytes> zeros;
    for (std::size_t i = 0; i < state.memory.size(); ++i) {
        zeros.emplace_back(state.written.sources[i].size());
        state.memory[i]->put(0, zeros.back());
    }
    return zeros;
}

std::size_t free_memory() {
    const cuda::PrimaryContext context(0);
    const cuda::CurrentContext current(context.handle());
    std::size_t free = 0;
    std::size_t total = 0;
    cuda::check(cuda::driver().memory_info(&free, &total), "cuMemGetInfo");
    return free;
}

}  // namespace

TEST(device_cache_lets_the_gate_go) {
    std::mt19937_64 random(9);
    for (const std::uint64_t limit : {1, 3, 1000}) {  // MiB: the state has 20
        const support::TempDir dir;
        const support::FaultScope scope;
        const auto executor = support::make_executor({"pwrite", true}, 2, kBlock, limit * kBlock);
        for (int round = 0; round < 3; ++round) {
            DeviceCase state(large_case(random, {1, 0, 0, 0, 0}), false);
            fault::arm("write", "delay", 10, 1, 0);
            const std::string path = dir / std::to_string(round);
            const auto job = executor->submit_write(path, state.written.plan, state.buffers);
            CHECK(job->gate(streams_of(state)));
            CHECK(limit < 1000 || !job->captured());
            const auto zeros = overwrite(state);
            CHECK(job->wait_captured());
            CHECK(job->torn().empty());
            job->finish({});
            CHECK(support::read_file(path) == state.written.expected);
            CHECK(job->stats().device_cache_bytes > 0);
            CHECK(limit == 1000 || job->stats().device_cache_bytes <= limit * kBlock);
            for (const auto& memory : state.memory) memory->synchronize();
        }
    }
}

TEST(device_cache_takes_host_and_device_sources) {
    std::mt19937_64 random(10);
    const support::TempDir dir;
    const support::FaultScope scope;
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock, 1000 * kBlock);
    for (int round = 0; round < 4; ++round) {
        DeviceCase state(large_case(random, {0, 1, 0, 0, 0}), true);
        fault::arm("write", "delay", 5, 1, 0);
        const std::string path = dir / std::to_string(round);
        const auto job = executor->submit_write(path, state.written.plan, state.buffers);
        CHECK(job->gate(streams_of(state)));
        const auto zeros = overwrite(state);
        job->finish({});
        CHECK(job->torn().empty());
        CHECK(support::read_file(path) == state.written.expected);
        for (const auto& memory : state.memory) memory->synchronize();
    }
}

TEST(device_cache_without_memory) {
    std::mt19937_64 random(11);
    const support::TempDir dir;
    for (const std::uint64_t fails_from : {1, 2}) {
        const support::FaultScope scope;
        const auto executor = support::make_executor({"pwrite", false}, 2, kBlock, 1000 * kBlock);
        DeviceCase state(large_case(random, {0, 0, 0, 0, 0}), false);
        fault::arm("write", "delay", 5, 1, 0);
        fault::arm("cuda_pool", "fail", ENOMEM, fails_from, 0);
        const std::string path = dir / std::to_string(fails_from);
        const auto job = executor->submit_write(path, state.written.plan, state.buffers);
        CHECK(job->gate(streams_of(state)));
        const auto zeros = overwrite(state);
        job->finish({});
        CHECK(job->torn().empty());
        CHECK(support::read_file(path) == state.written.expected);
        const std::uint64_t taken = job->stats().device_cache_bytes;
        CHECK(taken <= (fails_from - 1) * Evacuator::kExtentsPerSlab * kBlock);
        CHECK_EQ(taken > 0, fails_from > 1);
        for (const auto& memory : state.memory) memory->synchronize();
    }
}

TEST(device_cache_with_many_jobs_gates_and_aborts) {
    std::mt19937_64 random(12);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir;
        const auto executor = support::make_executor(setup, 2, kBlock, 1000 * kBlock);
        for (int round = 0; round < 10; ++round) {
            const std::string name = std::to_string(round);
            DeviceCase first(large_case(random, {0, 1, 0, 0}), round % 2 == 0);
            DeviceCase second(large_case(random, {1, 0, 0, 0}), false);
            const auto a = executor->submit_write(dir / name, first.written.plan, first.buffers);
            const auto b =
                executor->submit_write(dir / (name + "b"), second.written.plan, second.buffers);
            {
                std::vector<std::jthread> gates;
                for (int i = 0; i < 2; ++i) {
                    gates.emplace_back([&] { CHECK(a->gate(streams_of(first))); });
                    gates.emplace_back([&] { CHECK(b->gate(streams_of(second))); });
                }
                std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
                a->abort();
            }
            const auto zeros = overwrite(second);
            b->finish({});
            CHECK(b->torn().empty());
            CHECK(support::read_file(dir / (name + "b")) == second.written.expected);
            for (const auto& memory : second.memory) memory->synchronize();
        }
    }
}

TEST(device_cache_is_given_back) {
    std::mt19937_64 random(13);
    const support::TempDir dir;
    const support::FaultScope scope;
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock, 1000 * kBlock);
    DeviceCase state(large_case(random, {0, 0, 0, 0, 0, 0, 0, 0}), false);
    std::size_t before = 0;
    for (int round = 0; round < 3; ++round) {  // the first one sets up what stays: no gate
        fault::arm("write", "delay", 5, 1, 0);
        const auto job =
            executor->submit_write(dir / std::to_string(round), state.written.plan, state.buffers);
        CHECK(round == 0 || job->gate(streams_of(state)));
        CHECK(round == 0 || job->stats().device_cache_bytes > 30 * kBlock);
        job->finish({});
        state.memory.front()->synchronize();
        if (round == 0) before = free_memory();
    }
    CHECK(free_memory() + (8 * kBlock) >= before);
}

TEST(prepared_devices_and_reserved_memory) {
    const auto executor = support::make_executor({"pwrite", false}, 100, kBlock);
    executor->prepare_device(0);
    CHECK(!executor->pinned());
    CHECK_THROWS(ErrorCode::cuda, executor->prepare_device(1000));
    executor->reserve(70 * kBlock);
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    while (!executor->pinned() && Clock::now() < deadline) std::this_thread::yield();
    CHECK(executor->pinned());
}

TEST(memory_in_use_is_page_locked_too) {
    HostCache cache(130 * kBlock, kBlock);
    CopyEngines engines(cache);
    cache.reserve(cache.bytes());
    auto held = cache.acquire([] { return false; });
    std::ranges::fill(held->memory(), std::byte{7});
    const auto engine = engines.at(0);
    const auto next = cache.acquire([] { return false; });  // waits for the page lock
    CHECK(next->page_locked());
    cache.wait_settled();
    CHECK(cache.pinned() && held->page_locked());
    CHECK(std::ranges::all_of(held->memory(), [](std::byte b) { return b == std::byte{7}; }));
    std::byte* const lowest = held->memory().data();
    held.reset();
    CHECK(cache.try_acquire()->memory().data() == lowest);
}

TEST(cache_that_cannot_be_page_locked) {
    std::mt19937_64 random(6);
    const support::TempDir dir;
    const support::FaultScope scope;
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock);
    const DeviceCase state(large_case(random, {0, 0}), false);
    fault::arm("cuda_register", "fail", ENOMEM, 1, 1);
    const auto job = executor->submit_write(dir / "f", state.written.plan, state.buffers);
    CHECK(job->wait_captured());
    CHECK(!executor->pinned());
    CHECK(job->torn().empty());
    job->finish({});
    CHECK(support::read_file(dir / "f") == state.written.expected);
}

TEST(kernels_without_page_locked_memory_fail_the_job) {
    std::mt19937_64 random(14);
    const support::TempDir dir;
    const support::FaultScope scope;
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock);
    const DeviceCase state(large_case(random, {0, 0}), false);
    fault::arm("cuda_alloc", "fail", ENOMEM, 1, 1);
    CHECK_THROWS(ErrorCode::cuda,
                 executor->submit_write(dir / "f", state.written.plan, state.buffers));
    const auto job = executor->submit_write(dir / "g", state.written.plan, state.buffers);
    job->finish({});
    CHECK(support::read_file(dir / "g") == state.written.expected);
}

int main(int argc, char** argv) {
    if (cuda::device_count() == 0) {
        std::cout << "SKIPPED: no CUDA device; NOTHING of the device path was tested" << "\n"
                  << std::flush;
        return 77;
    }
    return check::run(argc, argv);
}
