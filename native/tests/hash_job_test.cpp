#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/checksum/hash.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;

namespace {

/// Sources in host memory, some of them empty, and some not on a word.
struct Sources {
    std::vector<Bytes> memory;
    std::vector<std::uint64_t> nbytes;
    Buffers buffers;

    Sources(std::mt19937_64& random, std::size_t count) {
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t size = i % 5 == 0 ? 0 : random() % (i % 3 == 0 ? 900000 : 3000);
            memory.push_back(support::random_bytes(random, size + 3));
            nbytes.push_back(size);
            buffers.address.push_back(reinterpret_cast<std::uint64_t>(memory[i].data()) + (i % 4));
            buffers.device.push_back(-1);
            buffers.stream.push_back(0);
        }
    }
    Bytes expected() const {
        Bytes all;
        for (std::size_t i = 0; i < nbytes.size(); ++i) {
            const Bytes some = hash::of_range({buffers.host(i), nbytes[i]});
            all.insert(all.end(), some.begin(), some.end());
        }
        return all;
    }
};

constexpr std::size_t kBlock = 65536;

}  // namespace

TEST(a_job_hashes_all_sources_in_order) {
    std::mt19937_64 random(5);
    for (const unsigned workers : {1U, 4U}) {
        const auto executor = support::make_executor({"pwrite", false}, 2, kBlock, 0, workers);
        for (const std::size_t count : {0, 1, 2, 40}) {
            const Sources sources(random, count);
            const auto job = executor->submit_hash(sources.nbytes, sources.buffers);
            CHECK(job->wait());
            CHECK(job->hashes() == sources.expected());
        }
    }
}

TEST(a_job_waits_for_a_worker_and_its_end_for_the_job) {
    std::mt19937_64 random(6);
    const support::TempDir dir;
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock, 0, 1);
    const auto written =
        support::WriteCase::make({support::random_bytes(random, 5)}, {0}, kBlock, 4096, random);
    for (const bool ended : {false, true}) {
        const support::FaultScope scope;
        fault::arm("open", "delay", support::kHeld, 1, 1);
        const auto held =
            executor->submit_write(dir / (ended ? "a" : "b"), written.plan, written.buffers());
        auto sources = std::make_unique<Sources>(random, 40);
        auto job = executor->submit_hash(sources->nbytes, sources->buffers);
        CHECK(!job->wait(Clock::now()));
        CHECK_THROWS(ErrorCode::invalid, job->hashes());
        const std::jthread goes_on([] { fault::clear(); });
        if (!ended) CHECK(job->wait());
        if (!ended) CHECK(job->hashes() == sources->expected());
        job.reset();
        sources.reset();  // the address sanitizer tells who still reads it
        held->finish({});
    }
}

TEST(jobs_go_on_beside_each_other_and_close_waits_for_them) {
    std::mt19937_64 random(7);
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock, 0, 3);
    const Sources sources(random, 30);
    const Bytes expected = sources.expected();
    std::vector<std::unique_ptr<HashJob>> jobs;
    for (int i = 0; i < 20; ++i) {
        jobs.push_back(executor->submit_hash(sources.nbytes, sources.buffers));
        if (i % 3 == 0) jobs.pop_back();
    }
    executor->close();
    for (const auto& job : jobs) {
        CHECK(job->wait(Clock::now()));
        CHECK(job->hashes() == expected);
    }
    CHECK_THROWS(ErrorCode::closed, executor->submit_hash(sources.nbytes, sources.buffers));
}

TEST(sources_that_do_not_fit_are_refused) {
    std::mt19937_64 random(8);
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock);
    Sources sources(random, 5);
    sources.nbytes.push_back(1);
    CHECK_THROWS(ErrorCode::invalid, executor->submit_hash(sources.nbytes, sources.buffers));
    sources.nbytes.pop_back();
    sources.buffers.address[1] = 0;
    CHECK_THROWS(ErrorCode::invalid, executor->submit_hash(sources.nbytes, sources.buffers));
    sources.buffers.device[1] = 1000;
    sources.buffers.address[1] = 1;
    CHECK_THROWS(ErrorCode::cuda, executor->submit_hash(sources.nbytes, sources.buffers));
}

TEST(memory_that_is_gone_is_told_by_its_source) {
    std::mt19937_64 random(9);
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock, 0, 3);
    Sources sources(random, 30);
    sources.nbytes[7] = 600000;
    sources.buffers.address[7] = 4096;
    const auto job = executor->submit_hash(sources.nbytes, sources.buffers);
    CHECK(job->wait());
    CHECK(job->lost() == std::vector<std::size_t>{7});
}

CHECK_MAIN()
