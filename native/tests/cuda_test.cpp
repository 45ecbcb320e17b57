#include "datastates/memory/cuda.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <thread>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/checksum/fingerprint.hpp"
#include "datastates/executor.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/gather.hpp"
#include "device_support.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;
using support::DeviceCase;
using support::DeviceMemory;
using support::kBlock;
using support::large_case;
using support::PackedCase;
using support::ReadCase;
using support::WriteCase;

namespace {

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
    std::vector<fingerprint::DeviceWords> ranges;
    std::vector<std::uint64_t> expected;
    for (int i = 0; i < 1000; ++i) {
        const std::uint64_t offset = random() % 4096;
        const std::uint64_t nbytes = random() % (i % 2 == 0 ? 1200 : 1000000);
        ranges.push_back({.address = memory.pointer() + offset,
                          .nbytes = nbytes,
                          .position = random() % 3 == 0 ? random() : 0});
        expected.push_back(
            fingerprint::whole(ranges.back().position, data.data() + offset, nbytes));
    }
    // Cut into many pieces.
    ranges.push_back({.address = memory.pointer(), .nbytes = data.size()});
    expected.push_back(fingerprint::whole(0, data.data(), data.size()));
    const DeviceDigests found = engine->digest(ranges, memory.stream());
    memory.synchronize();
    for (std::size_t i = 0; i < ranges.size(); ++i) CHECK_EQ(found.at(i), expected[i]);
}

TEST(a_second_digest_sees_every_change_of_one_byte) {
    std::mt19937_64 random(2);
    HostCache cache(kBlock, kBlock);
    CopyEngines engines(cache);
    const auto engine = engines.at(0);
    const DeviceMemory memory(1 << 20);
    Bytes data = support::random_bytes(random, 1 << 20);
    memory.put(0, data);
    const std::vector<fingerprint::DeviceWords> ranges = {
        {.address = memory.pointer() + 3, .nbytes = 4099},
        {.address = memory.pointer() + 8192, .nbytes = data.size() - 8192},
        {.address = memory.pointer() + 16, .nbytes = 0}};
    for (int round = 0; round < 200; ++round) {
        DeviceDigests digests = engine->digest(ranges, memory.stream());
        const std::size_t at =
            round % 2 == 0 ? 3 + (random() % 4099) : 8192 + (random() % (data.size() - 8192));
        memory.synchronize();
        data[at] ^= std::byte{1} << (random() % 8);
        if (round % 4 < 2) memory.put(at, Bytes{data[at]});
        if (round == 4) digests.leave_out(0);
        engine->digest_again(digests, memory.stream());
        memory.synchronize();
        CHECK(digests.done()->passed());
        if (round != 4) CHECK_EQ(digests.changed(0), round % 4 == 0);
        CHECK_EQ(digests.changed(1), round % 4 == 1);
        CHECK(!digests.changed(2));
    }
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
        const auto done =
            engine->gather(ranges, engine->capture_stream(),
                           by_image ? gather::kBlocksOnDevice : gather::kBlocksToHost);
        done->synchronize();
        CHECK(by_image ? image.get(0, kBlock) == expected
                       : std::ranges::equal(block->memory(), expected));
    }
}

TEST(gathers_large_pieces_on_the_device) {
    constexpr std::size_t kBytes = std::size_t{48} << 20;
    std::mt19937_64 random(15);
    HostCache cache(kBlock, kBlock);
    CopyEngines engines(cache);
    const auto engine = engines.at(0);
    const DeviceMemory from(kBytes);
    const DeviceMemory to(kBytes);
    const Bytes data = support::random_bytes(random, kBytes);
    from.put(0, data);
    from.synchronize();
    for (int round = 0; round < 3; ++round) {
        Bytes expected(kBytes);
        to.put(0, expected);
        to.synchronize();
        std::vector<gather::Range> ranges;
        std::size_t at = random() % 16;
        for (const std::size_t shift : {0, 16, 8, 4, 2, 1, 24, 20}) {
            // Source and destination differ by `shift` modulo 16 bytes. The length is odd.
            const std::size_t length = (random() % (5 << 20)) | 1;
            const std::size_t source = (at % 16) + shift + (random() % 1000 * 16);
            gather::add(ranges, to.pointer() + at, from.pointer() + source, length);
            std::copy_n(data.begin() + static_cast<std::ptrdiff_t>(source), length,
                        expected.begin() + static_cast<std::ptrdiff_t>(at));
            at += length + (random() % 100);
        }
        engine->gather(ranges, engine->evacuation_stream(), gather::kBlocksOnDevice)->synchronize();
        CHECK(to.get(0, kBytes) == expected);
    }
}

TEST(captures_thousands_of_small_sources) {
    std::mt19937_64 random(8);
    const support::TempDir dir;
    for (const bool page_locked : {true, false}) {
        const support::FaultScope scope;
        if (!page_locked) fault::arm("cuda_register", "fail", ENOMEM, 1, 0);
        const auto executor = support::make_executor({"pwrite", false}, 3, kBlock);
        std::vector<Bytes> sources;
        std::vector<std::uint8_t> eager;
        for (int i = 0; i < 3000; ++i) {
            sources.push_back(support::random_bytes(random, random() % 1300));
            eager.push_back(static_cast<std::uint8_t>(random() % 20 == 0));
        }
        const PackedCase state(
            WriteCase::make(std::move(sources), std::move(eager), kBlock, 262144, random), random);
        const std::string path = dir / (page_locked ? "locked" : "pageable");
        const auto job = executor->submit_write(path, state.written.plan, state.buffers);
        CHECK(job->wait_captured());
        CHECK_EQ(executor->pinned(), page_locked);
        CHECK(job->torn().empty());
        job->finish({});
        CHECK(support::read_file(path) == state.written.expected);
        CHECK(job->digests() == state.written.digests);
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
                CHECK(job->digests() == state.written.digests);
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
            CHECK(job->digests() == state.written.digests);
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
    fault::arm("write", "delay", support::kHeld, 1, 1);
    const auto job = executor->submit_write(dir / "f", state.written.plan, state.buffers);
    std::vector<Bytes> zeros(4);
    for (const std::size_t i : {2, 3}) {  // no gate
        zeros[i].resize(state.written.sources[i].size());
        state.memory[i]->put(0, zeros[i]);
        state.memory[i]->synchronize();
    }
    fault::clear();
    CHECK(job->wait_captured());
    CHECK(job->torn() == std::vector<int>{3});
    job->finish({});
}

TEST(one_changed_byte_of_a_device_source_is_noticed) {
    std::mt19937_64 random(14);
    const support::TempDir dir;
    const support::FaultScope scope;
    for (const std::uint64_t device_cache : {std::uint64_t{0}, 1000 * kBlock}) {
        for (int round = 0; round < 8; ++round) {
            const auto executor =
                support::make_executor({"pwrite", false}, 1, kBlock, device_cache);
            DeviceCase state(large_case(random, {0, 0, 0, 0}), false);
            fault::arm("capture", "fail", EIO, 1, 0);  // none begins
            const std::string path = dir / std::to_string((device_cache == 0 ? 0 : 100) + round);
            const auto job = executor->submit_write(path, state.written.plan, state.buffers);
            const std::size_t size = state.written.sources[2].size();
            const std::size_t at = random() % size;
            const Bytes byte{state.written.sources[2][at] ^ std::byte{4}};
            state.memory[2]->synchronize();
            state.memory[2]->put(at, byte);  // no gate, and no version
            state.memory[2]->synchronize();
            if (device_cache != 0) CHECK(job->gate(support::streams_of(state)));
            fault::clear();
            CHECK(job->wait_captured());
            CHECK(job->torn() == std::vector<int>{2});
            job->finish({});
        }
    }
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

TEST(prepared_devices_and_reserved_memory) {
    const auto executor = support::make_executor({"pwrite", false}, 100, kBlock);
    executor->prepare_device(0);
    CHECK(!executor->pinned());
    CHECK_THROWS(ErrorCode::cuda, executor->prepare_device(1000));
    executor->prepare_cache(70 * kBlock);
    const auto deadline = Clock::now() + std::chrono::seconds(20);
    while (!executor->pinned() && Clock::now() < deadline) std::this_thread::yield();
    CHECK(executor->pinned());
}

TEST(memory_in_use_is_page_locked_too) {
    HostCache cache(130 * kBlock, kBlock);
    CopyEngines engines(cache);
    cache.reserve(cache.bytes());
    cache.wait_settled();
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

int main(int argc, char** argv) { return support::run_on_device(argc, argv); }
