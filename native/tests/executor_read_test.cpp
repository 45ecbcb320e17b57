#include <cerrno>

#include "check.hpp"
#include "datastates/error.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;
using support::ReadCase;
using support::WriteCase;

namespace {

constexpr std::size_t kBlock = 256 * 1024;

WriteCase make_case(std::mt19937_64& random) {
    return WriteCase::make({support::random_bytes(random, 1000000),
                            {},
                            support::random_bytes(random, 70001),
                            support::random_bytes(random, 17),
                            support::random_bytes(random, 300000)},
                           {0, 0, 1, 0, 0}, kBlock, 4096, random);
}

void check_read(ReadCase& read, const WriteCase& written) {
    for (std::size_t i = 0; i < written.sources.size(); ++i) {
        CHECK(
            std::equal(written.sources[i].begin(), written.sources[i].end(), read.dests[i].data()));
    }
}

}  // namespace

TEST(reads_back_in_place_and_through_blocks) {
    std::mt19937_64 random(1);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir;
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        executor->submit_write(dir / "f", written.plan, written.buffers())->finish({});
        for (const std::size_t shift : {0, 1, 64}) {
            for (const std::size_t extent : {kBlock - 8192, std::size_t{100000}}) {
                ReadCase read = ReadCase::make(written, extent, shift);
                const auto job = executor->submit_read(dir / "f", read.plan, read.buffers());
                CHECK(job->wait());
                check_read(read, written);
                const ReadStats stats = job->stats();
                CHECK_EQ(stats.bytes_needed, read.plan->bytes());
                CHECK(stats.bytes_read >= stats.bytes_needed);
                if (!setup.direct) CHECK_EQ(stats.in_place_bytes, stats.bytes_needed);
            }
        }
    }
}

TEST(direct_reads_in_place_where_aligned) {
    std::mt19937_64 random(2);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir;
        const auto executor = support::make_executor(setup, 1, kBlock);
        WriteCase written;
        written.sources = {support::random_bytes(random, 200001)};
        written.source_at = {8192};
        written.order = {0};
        Bytes file(8192);
        file.insert(file.end(), written.sources[0].begin(), written.sources[0].end());
        support::write_file(dir / "f", file);
        ReadCase read = ReadCase::make(written, kBlock - 8192, 0);
        const auto job = executor->submit_read(dir / "f", read.plan, read.buffers());
        CHECK(job->wait());
        check_read(read, written);
        CHECK_EQ(job->stats().in_place_bytes, 200001U);
    }
}

TEST(flipped_bytes_name_the_first_bad_record) {
    std::mt19937_64 random(3);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir;
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        Bytes file = written.expected;
        file[written.source_at[4] + 299999] ^= std::byte{1};
        file[written.source_at[0] + 500000] ^= std::byte{128};
        support::write_file(dir / "f", file);
        ReadCase read = ReadCase::make(written, 100000, 0);
        const auto job = executor->submit_read(dir / "f", read.plan, read.buffers());
        try {
            job->wait();
            CHECK(false);
        } catch (const Error& error) {
            CHECK_EQ(to_string(error.code()), "corrupt");
            CHECK_EQ(error.record(), 0);
            CHECK_EQ(error.path(), dir / "f");
        }
    }
}

TEST(truncated_files_are_corrupt) {
    std::mt19937_64 random(4);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir;
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        Bytes file = written.expected;
        file.resize(written.source_at[4] + 299999);
        support::write_file(dir / "f", file);
        ReadCase read = ReadCase::make(written, 100000, 0);
        CHECK_THROWS(ErrorCode::corrupt,
                     executor->submit_read(dir / "f", read.plan, read.buffers())->wait());
        CHECK_THROWS(ErrorCode::io,
                     executor->submit_read(dir / "missing", read.plan, read.buffers()));
    }
}

TEST(faults) {
    std::mt19937_64 random(5);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir;
        const support::FaultScope scope;
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        support::write_file(dir / "f", written.expected);
        for (std::uint64_t nth = 1; nth <= 5; ++nth) {
            ReadCase read = ReadCase::make(written, 100000, 0);
            fault::arm("read", "fail", EIO, nth, 1);
            CHECK_THROWS(ErrorCode::io,
                         executor->submit_read(dir / "f", read.plan, read.buffers())->wait());
            fault::arm("read", nth % 2 == 0 ? "short" : "eintr", 0, nth, 20);
            CHECK(executor->submit_read(dir / "f", read.plan, read.buffers())->wait());
            check_read(read, written);
        }
    }
}

TEST(reads_beside_writes_and_abandoned_reads) {
    std::mt19937_64 random(6);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir;
        const auto executor = support::make_executor(setup, 1, kBlock);
        const WriteCase written = make_case(random);
        support::write_file(dir / "f", written.expected);
        for (int round = 0; round < 10; ++round) {
            auto abandoned = std::make_unique<ReadCase>(ReadCase::make(written, 100000, 0));
            ReadCase read = ReadCase::make(written, 100000, 3);
            const std::string path = dir / std::to_string(round);
            const auto write = executor->submit_write(path, written.plan, written.buffers());
            auto first = executor->submit_read(dir / "f", abandoned->plan, abandoned->buffers());
            const auto second = executor->submit_read(dir / "f", read.plan, read.buffers());
            first.reset();
            abandoned.reset();
            CHECK(second->wait());
            check_read(read, written);
            write->finish({});
            CHECK(support::read_file(path) == written.expected);
        }
    }
}

CHECK_MAIN()
