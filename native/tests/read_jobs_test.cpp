#include <algorithm>
#include <cerrno>
#include <chrono>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;
using support::ReadCase;
using support::WriteCase;

namespace {

constexpr std::size_t kBlock = 256 * 1024;
constexpr std::uint64_t kExtent = 100000;

WriteCase make_case(std::mt19937_64& random, std::size_t nbytes) {
    return WriteCase::make({support::random_bytes(random, nbytes)}, {0}, kBlock, 4096, random);
}

bool matches(ReadCase& read, const WriteCase& written) {
    const Bytes& source = written.sources[0];
    return std::equal(source.begin(), source.end(), read.dests[0].data());
}

/// Two files of one extent. The read of the first job hangs. With this backend that holds up one
/// thread only.
struct HeldCase {
    support::TempDir dir;
    support::FaultScope scope;
    std::mt19937_64 random{1};
    std::shared_ptr<Executor> executor;
    WriteCase written = make_case(random, kExtent / 2);
    ReadCase held = ReadCase::make(written, kExtent, 1);
    ReadCase other = ReadCase::make(written, kExtent, 1);
    std::unique_ptr<ReadJob> first;
    std::unique_ptr<ReadJob> second;

    HeldCase(std::size_t blocks, std::size_t block_bytes)
        : executor(
              support::make_executor({.backend = "pwrite", .direct = true}, blocks, block_bytes)) {
        for (const char* name : {"held", "other"}) {
            support::write_file(dir / name, written.expected);
            support::drop_cache(dir / name);
        }
        fault::arm("read", "delay", support::kHeld, 1, 1);
        first = executor->submit_read(dir / "held", held.plan, held.buffers());
        second = executor->submit_read(dir / "other", other.plan, other.buffers());
    }
    /// The second job ends while the read of the first one hangs.
    void check() {
        CHECK(second->wait());
        CHECK(matches(other, written));
        CHECK(!first->wait(Clock::now()));
        fault::clear();
        CHECK(first->wait());
        CHECK(matches(held, written));
    }
};

}  // namespace

TEST(a_job_does_not_wait_for_the_one_before_it) { HeldCase(8, kBlock).check(); }

/// A read that hangs keeps no other job from memory that comes.
TEST(a_job_begins_once_memory_has_come) {
    constexpr std::size_t kPiece = std::size_t{16} << 20;  // a block of this size is a piece
    HeldCase jobs(2, kPiece);
    // The first one has the block.
    CHECK(!jobs.second->wait(Clock::now() + std::chrono::milliseconds(50)));
    jobs.executor->prepare_cache(2 * kPiece);
    jobs.check();
}

/// Eight extents that are shared, and for which there are sixteen workers.
struct SharedCase {
    support::TempDir dir;
    support::FaultScope scope;
    std::mt19937_64 random{3};
    std::shared_ptr<Executor> executor =
        support::make_executor({.backend = "pwrite", .direct = true}, 8, kBlock, 0, 16);
    WriteCase written = make_case(random, 8 * kExtent);
    ReadCase read = ReadCase::make(written, kExtent, 1, true);

    SharedCase() { support::write_file(dir / "f", written.expected); }

    /// False where the file cannot be put out of the page cache.
    bool is_cold() {
        support::drop_cache(dir / "f");
        if (!DescriptorFile::open(dir / "f", true).cached(0, 1)) return true;
        std::cout << "SKIPPED: what is written to " << (dir / "f") << " stays in memory\n"
                  << std::flush;
        return false;
    }
    std::unique_ptr<ReadJob> submit() {
        return executor->submit_read(dir / "f", read.plan, read.buffers());
    }
    void check(const ReadJob& job) {
        CHECK(job.wait());
        CHECK(matches(read, written));
    }
};

/// The kernel reads ahead only for who reads in order.
TEST(shared_extents_have_four_readers) {
    SharedCase shared;
    for (const unsigned held : {3U, 4U}) {
        if (!shared.is_cold()) return;
        fault::arm("read", "delay", support::kHeld, 1, held);
        const auto job = shared.submit();
        if (held == 3) {
            const auto end = Clock::now() + std::chrono::milliseconds(support::kHeld) / 2;
            while (job->timeline().spans().empty()) {
                CHECK(Clock::now() < end);
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            }
        } else {
            CHECK(!job->wait(Clock::now() + std::chrono::milliseconds(100)));
            CHECK(job->timeline().spans().empty());
        }
        fault::clear();
        shared.check(*job);
    }
}

TEST(one_stream_suffices) {
    SharedCase shared;
    if (!shared.is_cold()) return;
    fault::arm("open", "fail", EMFILE, 2, 100);
    shared.check(*shared.submit());
}

TEST(many_jobs_share_few_blocks_and_each_reports_its_own_failure) {
    std::mt19937_64 random(2);
    constexpr int kJobs = 24;
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        for (const std::size_t blocks : {2, 16}) {
            const auto executor = support::make_executor(setup, blocks, kBlock);
            std::vector<WriteCase> written;
            std::vector<ReadCase> reads;
            for (int i = 0; i < kJobs; ++i) {
                written.push_back(make_case(random, 1 + random() % 500000));
                Bytes bytes = written.back().expected;
                if (i % 5 == 3) bytes[written.back().source_at[0]] ^= std::byte{1};
                const std::string path = dir / std::to_string(i);
                support::write_file(path, bytes);
                if (i % 2 == 0) support::drop_cache(path);
                reads.push_back(ReadCase::make(written.back(), kExtent, i % 3, i % 4 == 0));
            }
            std::vector<std::unique_ptr<ReadJob>> jobs;
            for (int i = 0; i < kJobs; ++i) {
                jobs.push_back(executor->submit_read(dir / std::to_string(i), reads[i].plan,
                                                     reads[i].buffers()));
                if (i % 7 == 5) jobs.back().reset();  // abandoned
            }
            for (int i = kJobs - 1; i >= 0; --i) {
                if (!jobs[i]) continue;
                if (i % 5 == 3) {
                    CHECK_THROWS(ErrorCode::corrupt, jobs[i]->wait());
                } else {
                    CHECK(jobs[i]->wait());
                    CHECK(matches(reads[i], written[i]));
                    CHECK(jobs[i]->stats().bytes_read >= reads[i].plan->bytes());
                }
            }
        }
    }
}

CHECK_MAIN()
