#include <algorithm>
#include <cerrno>
#include <chrono>
#include <thread>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/executor.hpp"
#include "datastates/memory/cuda.hpp"
#include "datastates/write/evacuator.hpp"
#include "device_support.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;
using support::DeviceCase;
using support::kBlock;
using support::large_case;
using support::PackedCase;
using support::streams_of;
using support::WriteCase;

namespace {

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
            CHECK(job->digests() == state.written.digests);
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
        CHECK(job->digests() == state.written.digests);
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
        fault::arm("cuda_slab", "fail", ENOMEM, fails_from, 0);
        const std::string path = dir / std::to_string(fails_from);
        const auto job = executor->submit_write(path, state.written.plan, state.buffers);
        CHECK(job->gate(streams_of(state)));
        const auto zeros = overwrite(state);
        job->finish({});
        CHECK(job->torn().empty());
        CHECK(support::read_file(path) == state.written.expected);
        CHECK(job->digests() == state.written.digests);
        CHECK_EQ(job->stats().device_cache_bytes > 0, fails_from > 1);
        for (const auto& memory : state.memory) memory->synchronize();
    }
}

TEST(device_cache_asks_for_less_where_it_must) {
    std::mt19937_64 random(16);
    const support::TempDir dir;
    // Blocks of the device cache; how often the driver refuses memory; bounds of the blocks taken.
    struct Case {
        std::uint64_t limit, refused, least, most;
    };
    for (const auto& [limit, refused, least, most] :
         {Case{1000, 0, 45, 54}, Case{1000, 1, 45, 54}, Case{1000, 3, 45, 54}, Case{20, 0, 15, 20},
          Case{20, 1, 15, 20}}) {
        const support::FaultScope scope;
        const auto executor = support::make_executor({"pwrite", false}, 2, kBlock, limit * kBlock);
        DeviceCase state(large_case(random, {0, 0, 0, 0, 0, 0, 0, 0}), false);  // 54 extents
        fault::arm("write", "delay", 20, 1, 0);
        if (refused > 0) fault::arm("cuda_slab", "fail", ENOMEM, 1, refused);
        const std::string path = dir / (std::to_string(limit) + "-" + std::to_string(refused));
        const auto job = executor->submit_write(path, state.written.plan, state.buffers);
        CHECK(job->gate(streams_of(state)));
        const auto zeros = overwrite(state);
        job->finish({});
        CHECK(job->torn().empty());
        CHECK(support::read_file(path) == state.written.expected);
        CHECK(job->stats().device_cache_bytes > least * kBlock);
        CHECK(job->stats().device_cache_bytes <= most * kBlock);
        for (const auto& memory : state.memory) memory->synchronize();
    }
}

TEST(device_cache_takes_sources_of_every_size_and_alignment) {
    std::mt19937_64 random(17);
    const support::TempDir dir;
    const support::FaultScope scope;
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock, 1000 * kBlock);
    for (int round = 0; round < 3; ++round) {
        std::vector<Bytes> sources;
        for (int i = 0; i < 2000; ++i) {
            sources.push_back(support::random_bytes(random, random() % 300));
        }
        for (int i = 0; i < 30; ++i) {  // 75 MB on average
            sources.push_back(support::random_bytes(random, random() % (5 << 20)));
        }
        std::ranges::shuffle(sources, random);
        std::vector<std::uint8_t> eager(sources.size());
        PackedCase state(
            WriteCase::make(std::move(sources), std::move(eager), kBlock, 262144, random), random);
        fault::arm("write", "delay", 5, 1, 0);
        const std::string path = dir / std::to_string(round);
        const auto job = executor->submit_write(path, state.written.plan, state.buffers);
        CHECK(job->gate(std::vector{std::pair{0, state.memory.stream_number()}}));
        CHECK(job->stats().device_cache_bytes > 0);
        const Bytes zeros(state.bytes());
        state.memory.put(0, zeros);
        job->finish({});
        CHECK(job->torn().empty());
        CHECK(support::read_file(path) == state.written.expected);
        CHECK(job->digests() == state.written.digests);
        state.memory.synchronize();
    }
}

TEST(device_cache_whose_kernel_cannot_be_told_fails_the_job) {
    std::mt19937_64 random(18);
    const support::TempDir dir;
    const support::FaultScope scope;
    const auto executor = support::make_executor({"pwrite", false}, 1, kBlock, 1000 * kBlock);
    std::vector<Bytes> sources;
    for (int i = 0; i < 8; ++i) sources.push_back(support::random_bytes(random, (5 * kBlock) + 3));
    const DeviceCase state(
        WriteCase::make(std::move(sources), std::vector<std::uint8_t>(8), kBlock, 262144, random),
        false);
    // The capture thread gets one block, and its first pieces need no kernel.
    fault::arm("write", "delay", 200, 1, 0);
    const auto job = executor->submit_write(dir / "f", state.written.plan, state.buffers);
    fault::arm("cuda_alloc", "fail", ENOMEM, 1, 0);
    CHECK(job->gate(streams_of(state)));
    CHECK_THROWS(ErrorCode::cuda, job->wait_captured());
    CHECK_EQ(job->stats().device_cache_bytes, 0U);
    job->abort();
    fault::clear();
    const auto next = executor->submit_write(dir / "g", state.written.plan, state.buffers);
    CHECK(next->gate(streams_of(state)));
    next->finish({});
    CHECK(next->torn().empty());
    CHECK(support::read_file(dir / "g") == state.written.expected);
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
    for (int round = 0; round < 3; ++round) {  // the first one, without a gate, makes what stays
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

int main(int argc, char** argv) { return support::run_on_device(argc, argv); }
