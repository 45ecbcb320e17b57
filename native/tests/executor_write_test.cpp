#include <array>
#include <atomic>
#include <map>
#include <set>
#include <thread>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;
using support::WriteCase;

namespace {

constexpr std::size_t kBlock = 65536;

void check_written(WriteJob& job, const WriteCase& written, const std::string& path,
                   const Bytes& tail) {
    CHECK(job.wait_captured());
    CHECK(job.torn().empty());
    job.finish(tail);
    CHECK(job.captured() && job.written());
    const auto crcs = job.source_crcs();
    std::vector<std::uint32_t> chunks;
    CHECK(job.digests() == written.digests);
    for (std::size_t i = 0; i < crcs.size(); ++i) {
        CHECK_EQ(crcs[i], crc32(0, written.sources[i]));
        const std::span<const std::byte> all(written.sources[i]);
        const std::uint64_t chunk = written.plan->chunk_bytes();
        for (std::uint64_t at = 0; at < all.size(); at += chunk) {
            chunks.push_back(
                crc32(0, all.subspan(at, std::min<std::uint64_t>(chunk, all.size() - at))));
        }
    }
    CHECK(std::ranges::equal(job.chunk_crcs(), chunks));
    Bytes expected = written.expected;
    expected.insert(expected.end(), tail.begin(), tail.end());
    CHECK(support::read_file(path) == expected);
    CHECK_EQ(job.stats().bytes, expected.size());
}

}  // namespace

TEST(random_plans_with_every_cache_size) {
    std::mt19937_64 random(1);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        for (const std::size_t blocks : {1, 2, 3, 16}) {
            const auto executor = support::make_executor(setup, blocks, kBlock);
            for (int round = 0; round < 12; ++round) {
                const WriteCase written = WriteCase::random(random, kBlock);
                const std::string path =
                    dir / (std::to_string(blocks) + "-" + std::to_string(round));
                const auto job = executor->submit_write(path, written.plan, written.buffers());
                check_written(*job, written, path, support::random_bytes(random, random() % 9000));
            }
        }
    }
}

TEST(tails) {
    std::mt19937_64 random(2);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        for (const std::size_t size : {0, 1, 4095, 4096, 4097, 9 << 20}) {
            for (const std::size_t source : {0, 1, 64, 8192 - 256, 70000}) {
                const WriteCase written = WriteCase::make({support::random_bytes(random, source)},
                                                          {0}, kBlock, 1000, random);
                const std::string path =
                    dir / (std::to_string(size) + "-" + std::to_string(source));
                const auto job = executor->submit_write(path, written.plan, written.buffers());
                check_written(*job, written, path, support::random_bytes(random, size));
            }
        }
    }
}

TEST(a_file_that_is_created_later) {
    std::mt19937_64 random(20);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 4, kBlock);
        const WriteCase written = WriteCase::make(
            {support::random_bytes(random, 70000), support::random_bytes(random, 9)}, {0, 1},
            kBlock, 1000, random);
        const auto job = executor->submit_write(std::nullopt, written.plan, written.buffers());
        CHECK(job->wait_captured());
        CHECK(!job->made() && !job->written());
        job->create(dir / "f");
        check_written(*job, written, dir / "f", support::random_bytes(random, 5000));
        CHECK_THROWS(ErrorCode::invalid, job->create(dir / "g"));
        const auto never = executor->submit_write(std::nullopt, written.plan, written.buffers());
        never->abort();
        CHECK(!never->made());
    }
}

TEST(nothing_but_a_tail) {
    std::mt19937_64 random(3);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        WriteCase written = WriteCase::make({}, {}, kBlock, 1000, random);
        written.plan = std::make_shared<WritePlan>(
            WritePlanArrays{.chunk_bytes = 1, .extent_piece = std::array<std::uint64_t, 1>{0}});
        written.expected.clear();
        const auto job = executor->submit_write(dir / "f", written.plan, written.buffers());
        CHECK(job->gate({}, Clock::now()));
        check_written(*job, written, dir / "f", support::random_bytes(random, 5000));
        CHECK_THROWS(ErrorCode::closed, job->finish({}));
    }
}

TEST(many_jobs_in_flight_over_two_blocks) {
    std::mt19937_64 random(4);
    for (const support::Setup& setup : support::setups()) {
        for (const std::size_t blocks : {1, 2, 3}) {
            const support::TempDir dir(setup);
            const auto executor = support::make_executor(setup, blocks, kBlock);
            std::vector<WriteCase> cases;
            std::vector<std::unique_ptr<WriteJob>> jobs;
            for (int i = 0; i < 6; ++i) {
                // Every job has a half-filled block: eager and lazy sources in one extent.
                cases.push_back(WriteCase::make(
                    {support::random_bytes(random, 5000), support::random_bytes(random, 400000)},
                    {1, 0}, kBlock, 4096, random));
            }
            for (int i = 0; i < 6; ++i) {
                jobs.push_back(executor->submit_write(dir / std::to_string(i), cases.at(i).plan,
                                                      cases.at(i).buffers()));
            }
            for (int i = 5; i >= 0; --i) {
                check_written(*jobs.at(i), cases.at(i), dir / std::to_string(i), {});
            }
        }
    }
}

TEST(eager_sources_may_change_at_once) {
    std::mt19937_64 random(5);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        WriteCase written = WriteCase::make(
            {support::random_bytes(random, 200000), support::random_bytes(random, 9)}, {1, 1},
            kBlock, 4096, random);
        const auto original = written.sources;
        const auto job = executor->submit_write(dir / "f", written.plan, written.buffers());
        for (Bytes& source : written.sources) std::ranges::fill(source, std::byte{0});
        written.sources = original;
        check_written(*job, written, dir / "f", {});
    }
}

TEST(torn_sources_are_named) {
    std::mt19937_64 random(6);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const support::FaultScope scope;
        const auto executor = support::make_executor(setup, 1, kBlock);
        WriteCase written = WriteCase::make(
            {support::random_bytes(random, 500000), support::random_bytes(random, 400000),
             support::random_bytes(random, 300000)},
            {0, 0, 0}, kBlock, 4096, random);
        fault::arm("write", "delay", support::kHeld, 1, 1);
        auto buffers = written.buffers();
        buffers.witness = {1, 1, 0};
        const auto job = executor->submit_write(dir / "f", written.plan, buffers);
        // The first write holds the only block, so later extents are not captured yet.
        for (const std::size_t i : {1, 2}) {
            for (std::byte& byte : written.sources[i]) {
                std::atomic_ref(byte).store(std::byte{0}, std::memory_order_relaxed);
            }
        }
        CHECK(!job->captured());
        fault::clear();
        CHECK(job->wait_captured());
        CHECK(job->torn() == std::vector<int>{1});
        job->finish({});
    }
}

TEST(one_changed_byte_of_a_small_state_is_noticed) {
    std::mt19937_64 random(16);
    for (const support::Setup& setup : support::setups()) {
        for (const std::size_t nbytes : {std::size_t{70001}, std::size_t{15} << 20}) {
            const support::TempDir dir(setup);
            const support::FaultScope scope;
            const auto executor = support::make_executor(setup, 1, kBlock);
            WriteCase written = WriteCase::make(
                {support::random_bytes(random, 500000), support::random_bytes(random, nbytes)},
                {0, 0}, kBlock, 4096, random);
            auto buffers = written.buffers();
            buffers.witness = {1, 1};
            for (const bool changes : {false, true}) {
                fault::arm("write", "delay", support::kHeld, 1, 1);
                const auto job = executor->submit_write(dir / (changes ? "changed" : "same"),
                                                        written.plan, buffers);
                // The first write holds the only block, so the last extent is not captured yet.
                if (changes) {
                    std::byte& byte = written.sources[1][20000];  // in no sampled word
                    std::atomic_ref(byte).store(~byte, std::memory_order_relaxed);
                }
                CHECK(!job->captured());
                fault::clear();
                CHECK(job->wait_captured());
                CHECK(job->torn() == (changes ? std::vector<int>{1} : std::vector<int>{}));
                job->finish({});
            }
        }
    }
}

TEST(gate_and_waits_time_out) {
    std::mt19937_64 random(7);
    const support::TempDir dir;
    const support::FaultScope scope;
    const auto executor = support::make_executor({"pwrite", false}, 1, kBlock);
    const WriteCase written =
        WriteCase::make({support::random_bytes(random, 300000)}, {0}, kBlock, 4096, random);
    fault::arm("write", "delay", support::kHeld, 1, 1);
    const auto job = executor->submit_write(dir / "f", written.plan, written.buffers());
    const auto soon = Clock::now() + std::chrono::milliseconds(5);
    CHECK(!job->gate({}, soon));
    CHECK(!job->wait_captured(soon));
    CHECK(!job->wait_written(soon));
    fault::clear();
    CHECK(job->gate({}));
    CHECK(job->wait_captured());
    CHECK(job->wait_written());
}

TEST(aborts_at_any_time) {
    std::mt19937_64 random(8);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        for (int round = 0; round < 40; ++round) {
            // Freed right after abort, so that a sanitizer reports a late read.
            auto written = std::make_unique<WriteCase>(WriteCase::make(
                {support::random_bytes(random, 3000), support::random_bytes(random, 500000)},
                {1, 0}, kBlock, 4096, random));
            auto other = std::make_unique<WriteCase>(WriteCase::random(random, kBlock));
            const std::string name = std::to_string(round);
            auto job = executor->submit_write(dir / name, written->plan, written->buffers());
            auto second = executor->submit_write(dir / (name + "b"), other->plan, other->buffers());
            std::this_thread::sleep_for(std::chrono::microseconds(random() % 400));
            if (round % 2 == 0) {
                job->abort();
                job->abort();
                written.reset();
                check_written(*second, *other, dir / (name + "b"), {});
                CHECK_THROWS(ErrorCode::cancelled, job->finish({}));
            } else {
                second.reset();
                other.reset();
                check_written(*job, *written, dir / name, {});
            }
        }
    }
}

TEST(timelines_name_every_stage) {
    std::mt19937_64 random(11);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 3, kBlock);
        const WriteCase written =
            WriteCase::make({support::random_bytes(random, 500000)}, {0}, kBlock, 4096, random);
        const auto job = executor->submit_write(dir / "f", written.plan, written.buffers());
        check_written(*job, written, dir / "f", Bytes(5000));
        CHECK_EQ(job->backend_name(), setup.memory ? "memory" : setup.backend);
        CHECK_EQ(job->timeline().dropped(), 0U);
        const auto bytes = [&](Stage stage) { return support::bytes_of(job->timeline(), stage); };
        CHECK_EQ(bytes(Stage::write) + bytes(Stage::tail), written.expected.size() + 5000);
        CHECK_EQ(bytes(Stage::sync), written.expected.size() + 5000);
        std::set<Stage> stages;
        for (const Span& span : job->timeline().spans()) stages.insert(span.stage);
        for (const Stage stage :
             {Stage::submit, Stage::create, Stage::cache_wait, Stage::write, Stage::tail}) {
            CHECK(stages.contains(stage));
        }
        std::map<std::uint32_t, Clock::time_point> busy;
        std::vector<Span> spans = job->timeline().spans();
        std::erase_if(spans, [](const Span& span) { return span.stage != Stage::write; });
        CHECK_EQ(spans.size(), written.expected.size() / kBlock + 1);
        std::ranges::sort(spans, {}, &Span::begin);
        for (const Span& span : spans) {
            CHECK(busy[span.track] <= span.begin);
            busy[span.track] = span.end;
        }
    }
}

TEST(timelines_show_writes_from_when_they_begin) {
    std::mt19937_64 random(18);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 40, kBlock);
        const WriteCase written = WriteCase::make({support::random_bytes(random, 40 * kBlock)}, {0},
                                                  kBlock, 262144, random);
        const auto job = executor->submit_write(dir / "f", written.plan, written.buffers());
        check_written(*job, written, dir / "f", {});
        // At most twice the queue depth, the number of workers, or of I/O threads.
        const std::map<std::string, std::size_t> at_a_time = {
            {"io_uring", 8}, {"memory", 4}, {"pwrite", 3}};
        std::set<std::uint32_t> tracks;
        for (const Span& span : job->timeline().spans()) {
            if (span.stage == Stage::write) tracks.insert(span.track);
        }
        CHECK(!tracks.empty());
        CHECK(tracks.size() <= at_a_time.at(job->backend_name()));
    }
}

TEST(checksums_are_known_before_all_is_written) {
    std::mt19937_64 random(19);
    const support::TempDir dir;
    const support::FaultScope scope;
    const auto executor = support::make_executor({"pwrite", false}, 3, kBlock);
    const WriteCase written =
        WriteCase::make({support::random_bytes(random, 500000)}, {0}, kBlock, 4096, random);
    fault::arm("write", "delay", support::kHeld, 1, 1);
    const auto job = executor->submit_write(dir / "f", written.plan, written.buffers());
    CHECK(job->wait_checksummed());
    CHECK(!job->written());
    CHECK(job->digests() == written.digests);
    fault::clear();
    check_written(*job, written, dir / "f", {});
}

TEST(four_workers_copy_host_sources_but_for_the_last_extent) {
    std::mt19937_64 random(20);
    const support::TempDir dir;
    const WriteCase written =
        WriteCase::make({support::random_bytes(random, 20 * kBlock)}, {0}, kBlock, 4096, random);
    const std::size_t extents = written.plan->extents().size();
    for (const unsigned workers : {3U, 4U}) {
        const auto executor = support::make_executor({"pwrite", false}, 40, kBlock, 0, workers);
        const std::string path = dir / std::to_string(workers);
        const auto job = executor->submit_write(path, written.plan, written.buffers());
        check_written(*job, written, path, {});
        const std::vector<Span> spans = job->timeline().spans();
        CHECK_EQ(static_cast<std::size_t>(std::ranges::count(spans, Stage::capture, &Span::stage)),
                 extents);
        const auto by_workers = std::ranges::count_if(spans, [](const Span& span) {
            return span.stage == Stage::capture && span.track >= kWorkerTracks;
        });
        CHECK_EQ(static_cast<std::size_t>(by_workers), workers < 4 ? 0 : extents - 1);
    }
}

TEST(a_gate_waits_for_what_workers_copy) {
    std::mt19937_64 random(21);
    const support::TempDir dir;
    constexpr std::size_t kLarge = std::size_t{256} << 10;
    const auto executor = support::make_executor({"pwrite", false}, 24, kLarge);
    WriteCase written = WriteCase::make({support::random_bytes(random, (20 * kLarge) + 1)}, {0},
                                        kLarge, 4096, random);
    const Bytes before = written.sources[0];
    for (int round = 0; round < 10; ++round) {
        const std::string path = dir / std::to_string(round);
        const auto job = executor->submit_write(path, written.plan, written.buffers());
        CHECK(job->gate({}));
        std::ranges::fill(written.sources[0], std::byte{0});
        CHECK(job->wait_captured());
        std::ranges::copy(before, written.sources[0].begin());
        check_written(*job, written, path, {});
    }
}

TEST(submit_from_many_threads) {
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        std::vector<std::jthread> threads;
        for (int t = 0; t < 4; ++t) {
            threads.emplace_back([&, t] {
                std::mt19937_64 random(static_cast<std::uint64_t>(t) + 100);
                for (int round = 0; round < 5; ++round) {
                    const WriteCase written = WriteCase::random(random, kBlock);
                    const std::string path =
                        dir / (std::to_string(t) + "-" + std::to_string(round));
                    const auto job = executor->submit_write(path, written.plan, written.buffers());
                    check_written(*job, written, path, support::random_bytes(random, 100));
                }
            });
        }
    }
}

/// Calls `look` while a fault point holds up the write of two blocks.
template <typename Look>
void look_while_held(const char* point, const Look& look) {
    std::mt19937_64 random(11);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const support::FaultScope scope;
        const auto executor = support::make_executor(setup, 4, kBlock);
        const WriteCase written =
            WriteCase::make({support::random_bytes(random, 2 * kBlock)}, {0}, kBlock, 4096, random);
        fault::arm(point, "delay", support::kHeld, 1, 1);
        const auto job = executor->submit_write(dir / "f", written.plan, written.buffers());
        look(*job, dir / "f");
        fault::clear();
        check_written(*job, written, dir / "f", {});
    }
}

TEST(state_is_captured_before_there_is_a_file) {
    look_while_held("open", [](WriteJob& job, const std::string& path) {
        job.wait_captured();
        CHECK(job.gate({}));
        CHECK(!std::filesystem::exists(path));
    });
}

TEST(a_file_is_made_before_it_has_its_size) {
    look_while_held("allocate", [](WriteJob& job, const std::string& path) {
        job.wait_made();
        CHECK(std::filesystem::exists(path));
        CHECK(!job.written());
    });
}

TEST(more_than_the_cache_holds_waits_for_the_file) {
    std::mt19937_64 random(12);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const support::FaultScope scope;
        const auto executor = support::make_executor(setup, 1, kBlock);
        for (const std::uint8_t eager : {0, 1}) {
            const WriteCase written = WriteCase::make({support::random_bytes(random, 5 * kBlock)},
                                                      {eager}, kBlock, 4096, random);
            fault::arm("open", "delay", 50, 1, 1);
            const std::string path = dir / std::to_string(eager);
            const auto job = executor->submit_write(path, written.plan, written.buffers());
            check_written(*job, written, path, {});
        }
    }
}

TEST(no_file_appears_after_an_abort) {
    std::mt19937_64 random(14);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const support::FaultScope scope;
        for (const std::size_t blocks : {1, 16}) {
            const WriteCase written = WriteCase::make({support::random_bytes(random, 5 * kBlock)},
                                                      {0}, kBlock, 4096, random);
            for (const auto* point : {"open", "allocate"}) {
                auto executor = support::make_executor(setup, blocks, kBlock);
                fault::arm(point, "delay", 50, 1, 1);
                auto job = executor->submit_write(dir / point, written.plan, written.buffers());
                job->abort();
                CHECK_EQ(std::filesystem::remove(dir / point), job->made());
                CHECK_THROWS(ErrorCode::cancelled, job->finish({}));
                job.reset();
                executor.reset();  // waits for the worker that was to make the file
                CHECK(!std::filesystem::exists(dir / point));
            }
        }
    }
}

TEST(close_waits_and_refuses) {
    std::mt19937_64 random(9);
    const support::TempDir dir;
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock);
    const WriteCase written = WriteCase::random(random, kBlock);
    const auto job = executor->submit_write(dir / "f", written.plan, written.buffers());
    executor->close();
    executor->close();
    CHECK(job->written());
    CHECK_THROWS(ErrorCode::closed,
                 executor->submit_write(dir / "g", written.plan, written.buffers()));
    check_written(*job, written, dir / "f", {});
}

TEST(refuses_what_does_not_fit) {
    std::mt19937_64 random(10);
    const support::TempDir dir;
    const auto executor = support::make_executor({"pwrite", false}, 2, kBlock / 2);
    const WriteCase written = WriteCase::make({Bytes(kBlock)}, {0}, kBlock, 4096, random);
    CHECK_THROWS(ErrorCode::invalid,
                 executor->submit_write(dir / "f", written.plan, written.buffers()));
    auto on_device = written.buffers();
    const auto larger = support::make_executor({"pwrite", false}, 2, kBlock);
    on_device.device[0] = 4096;
    CHECK_THROWS(ErrorCode::cuda, larger->submit_write(dir / "g", written.plan, on_device));
}

CHECK_MAIN()
