#include <cerrno>
#include <limits>

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
constexpr std::size_t kExtents = 11;

WriteCase make_case(std::mt19937_64& random) {
    return WriteCase::make(
        {support::random_bytes(random, 700000), support::random_bytes(random, 400000)}, {0, 0},
        kBlock, 4096, random);
}

/// A plan of the first extents without destinations. Each begins `shifted` bytes later.
std::shared_ptr<ReadPlan> first_of(const ReadPlan& plan, std::size_t count = kExtents,
                                   std::uint64_t shifted = 0) {
    std::vector<std::uint64_t> offset, length, index{0};
    for (const ReadPlan::Extent& extent : plan.extents().first(count)) {
        offset.push_back(extent.offset + shifted);
        length.push_back(extent.length - shifted);
        index.push_back(offset.size());
    }
    const std::vector<std::uint64_t> zero(count + 1);
    return support::plan_of_single(ReadPlanArrays{.extent_offset = offset,
                                                  .extent_length = length,
                                                  .extent_span = index,
                                                  .span_offset = std::span(zero).first(count),
                                                  .span_length = length,
                                                  .extent_piece = zero,
                                                  .extent_check = zero});
}

bool matches(ReadCase& read, const WriteCase& written) {
    for (std::size_t i = 0; i < written.sources.size(); ++i) {
        const Bytes& source = written.sources[i];
        if (!std::equal(source.begin(), source.end(), read.dests[i].data())) return false;
    }
    return true;
}

/// Writes a file that is not cached; false where the file system keeps it in memory.
bool write_cold(const std::string& path, const Bytes& bytes) {
    support::write_file(path, bytes);
    support::drop_cache(path);
    const File file = File::open(path, true);
    if (file.direct() && !file.cached(0, 1)) return true;
    std::cout << "SKIPPED: what is written to " << path << " stays in memory\n" << std::flush;
    return false;
}

/// Setups with O_DIRECT. Other reads fill the page cache, and cached extents are not read ahead.
std::vector<support::Setup> direct_setups() {
    std::vector<support::Setup> setups = support::setups();
    std::erase_if(setups, [](const support::Setup& s) { return !s.direct || s.memory; });
    return setups;
}

}  // namespace

TEST(what_is_read_ahead_is_not_read_again) {
    std::mt19937_64 random(1);
    for (const support::Setup& setup : direct_setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 32, kBlock);
        const WriteCase written = make_case(random);
        if (!write_cold(dir / "f", written.expected)) continue;
        ReadCase read = ReadCase::make(written, kExtent, 1);
        const auto ahead = executor->read_ahead(dir / "f", first_of(*read.plan));
        ahead->wait();
        const std::uint64_t bytes_read = ahead->bytes_read();
        CHECK(bytes_read >= kExtents * kExtent);
        support::write_file(dir / "f", Bytes(written.expected.size()));
        const auto job = executor->submit_read(dir / "f", read.plan, read.buffers(), ahead.get());
        CHECK(job->wait());
        CHECK(matches(read, written));
        CHECK_EQ(job->stats().bytes_read, bytes_read);
        std::uint64_t length = 0;
        for (const ReadPlan::Extent& extent : read.plan->extents()) length += extent.length;
        CHECK_EQ(support::bytes_of(job->timeline(), Stage::read), length);
        // The bytes are used and counted only once.
        CHECK_EQ(ahead->bytes_read(), 0U);
        const auto again = executor->submit_read(dir / "f", read.plan, read.buffers(), ahead.get());
        CHECK_THROWS(ErrorCode::corrupt, again->wait());
    }
}

TEST(what_is_read_ahead_is_verified) {
    std::mt19937_64 random(2);
    for (const support::Setup& setup : direct_setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 32, kBlock);
        const WriteCase written = make_case(random);
        Bytes damaged = written.expected;
        damaged[written.source_at[1] + 5] ^= std::byte{1};
        if (!write_cold(dir / "f", damaged)) continue;
        ReadCase read = ReadCase::make(written, kExtent, 0);
        const auto ahead = executor->read_ahead(dir / "f", first_of(*read.plan));
        ahead->wait();
        support::write_file(dir / "f", written.expected);
        const auto job = executor->submit_read(dir / "f", read.plan, read.buffers(), ahead.get());
        CHECK_THROWS(ErrorCode::corrupt, job->wait());
    }
}

TEST(whenever_a_job_takes_over_it_reads_all) {
    std::mt19937_64 random(3);
    for (const support::Setup& setup : support::setups()) {
        const support::FaultScope scope;
        const support::TempDir dir(setup);
        const WriteCase written = make_case(random);
        support::write_file(dir / "f", written.expected);
        for (const std::size_t blocks : {2, 5, 32}) {
            const auto executor = support::make_executor(setup, blocks, kBlock);
            for (const auto* how : {"at once", "later", "shifted", "shifted at once", "failed",
                                    "slow", "never", "closed at once"}) {
                const std::string_view name(how);
                support::drop_cache(dir / "f");
                ReadCase read = ReadCase::make(written, kExtent, 1);
                if (name == "failed") fault::arm("read", "fail", EIO, 3, 1);
                if (name == "slow") fault::arm("read", "delay", 5, 1, kExtents);
                auto ahead = executor->read_ahead(
                    dir / "f", first_of(*read.plan, std::min(blocks / 2, kExtents),
                                        name.starts_with("shifted") ? 512 : 0));
                if (name == "later" || name == "shifted" || name == "failed") ahead->wait();
                if (name == "failed") fault::clear();
                if (name == "never" || name == "closed at once") ahead->close();
                const auto job =
                    executor->submit_read(dir / "f", read.plan, read.buffers(), ahead.get());
                if (name == "later") ahead.reset();
                CHECK(job->wait());
                CHECK(matches(read, written));
                fault::clear();
            }
        }
    }
}

TEST(a_read_that_fails_after_it_was_taken_over_fails_the_job) {
    std::mt19937_64 random(4);
    for (const support::Setup& setup : direct_setups()) {
        const support::FaultScope scope;
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 32, kBlock);
        const WriteCase written = make_case(random);
        if (!write_cold(dir / "f", written.expected)) continue;
        ReadCase read = ReadCase::make(written, kExtent, 1);
        fault::arm("read", "fail", EIO, 1, std::numeric_limits<int>::max());
        const auto ahead = executor->read_ahead(dir / "f", first_of(*read.plan));
        const auto job = executor->submit_read(dir / "f", read.plan, read.buffers(), ahead.get());
        CHECK_THROWS(ErrorCode::io, job->wait());
    }
}

TEST(blocks_are_given_back) {
    std::mt19937_64 random(5);
    for (const support::Setup& setup : direct_setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        if (!write_cold(dir / "f", written.expected)) continue;
        const ReadCase read = ReadCase::make(written, kExtent, 0);
        for (int i = 0; i < 3; ++i) {
            support::drop_cache(dir / "f");
            const auto ahead = executor->read_ahead(dir / "f", first_of(*read.plan, 1));
            ahead->wait();
            CHECK(ahead->bytes_read() >= kExtent);
            // A write uses the other half of the cache meanwhile.
            const std::string path = dir / ("g" + std::to_string(i));
            executor->submit_write(path, written.plan, written.buffers())->finish({});
            CHECK(support::read_file(path) == written.expected);
        }
    }
}

TEST(blocks_are_left_to_other_jobs) {
    std::mt19937_64 random(9);
    // The host cache provides so many blocks of this length at a time.
    constexpr std::size_t kLarge = std::size_t{1} << 20, kMany = 64;
    for (const support::Setup& setup : direct_setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2 * kMany, kLarge);
        const WriteCase written = WriteCase::make({support::random_bytes(random, kMany * kExtent)},
                                                  {0}, kLarge, 4096, random);
        if (!write_cold(dir / "f", written.expected)) continue;
        if (!write_cold(dir / "g", written.expected)) continue;
        ReadCase read = ReadCase::make(written, kExtent, 1);
        const auto ahead = executor->read_ahead(dir / "f", first_of(*read.plan, kMany));
        ahead->wait();
        CHECK(ahead->bytes_read() >= kMany * kExtent);
        CHECK(executor->submit_read(dir / "g", read.plan, read.buffers())->wait());
        CHECK(matches(read, written));
    }
}

TEST(several_files_are_read_ahead) {
    std::mt19937_64 random(10);
    for (const support::Setup& setup : direct_setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 32, kBlock);
        const WriteCase written = make_case(random);
        std::vector<ReadCase> reads;
        std::vector<std::unique_ptr<ReadAhead>> ahead;
        for (const char* name : {"f", "g", "h"}) {
            if (!write_cold(dir / name, written.expected)) continue;
            reads.push_back(ReadCase::make(written, kExtent, 1));
            ahead.push_back(executor->read_ahead(dir / name, first_of(*reads.back().plan, 5)));
        }
        for (const auto& one : ahead) {
            one->wait();
            CHECK(one->bytes_read() >= 5 * kExtent);
        }
        // Jobs take over in any order.
        for (std::size_t i = ahead.size(); i-- > 0;) {
            const std::string path = dir / std::string{"fgh"[i]};
            CHECK(executor->submit_read(path, reads[i].plan, reads[i].buffers(), ahead[i].get())
                      ->wait());
            CHECK(matches(reads[i], written));
        }
    }
}

TEST(together_they_hold_at_most_half_of_the_blocks) {
    std::mt19937_64 random(6);
    for (const support::Setup& setup : direct_setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 32, kBlock);
        const WriteCase written = make_case(random);
        if (!write_cold(dir / "f", written.expected)) continue;
        ReadCase read = ReadCase::make(written, kExtent, 1),
                 other = ReadCase::make(written, kExtent, 1);
        const auto first = executor->read_ahead(dir / "f", first_of(*read.plan));
        const auto second = executor->read_ahead(dir / "f", first_of(*read.plan));
        second->wait();
        first->wait();
        CHECK_EQ(second->bytes_read(), 0U);
        CHECK(first->bytes_read() > 0);
        const auto job =
            executor->submit_read(dir / "f", other.plan, other.buffers(), second.get());
        CHECK(job->wait());
        CHECK(matches(other, written));
        CHECK(executor->submit_read(dir / "f", read.plan, read.buffers(), first.get())->wait());
        CHECK(matches(read, written));
        first->close();
        support::drop_cache(dir / "f");
        const auto third = executor->read_ahead(dir / "f", first_of(*read.plan));
        third->wait();
        CHECK(third->bytes_read() > 0);
    }
}

TEST(is_refused) {
    for (const support::Setup& setup : support::setups()) {
        std::mt19937_64 random(7);
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 4, kBlock);
        const WriteCase written = make_case(random);
        support::write_file(dir / "f", written.expected);
        const ReadCase read = ReadCase::make(written, kExtent, 0);
        const ReadCase large = ReadCase::make(written, kBlock, 0);
        const auto two = first_of(*read.plan, 2);
        CHECK_THROWS(ErrorCode::invalid, executor->read_ahead(dir / "f", read.plan));
        CHECK_THROWS(ErrorCode::invalid, executor->read_ahead(dir / "f", first_of(*read.plan, 3)));
        CHECK_THROWS(ErrorCode::invalid, executor->read_ahead(dir / "f", first_of(*large.plan, 2)));
        CHECK_THROWS(ErrorCode::io, executor->read_ahead(dir / "none", two));
        support::write_file(dir / "g", written.expected);
        const auto ahead = executor->read_ahead(dir / "g", two);
        const auto other = support::make_executor(setup, 4, kBlock);
        ReadCase into = ReadCase::make(written, kExtent, 0);
        CHECK_THROWS(ErrorCode::invalid,
                     executor->submit_read(dir / "f", into.plan, into.buffers(), ahead.get()));
        CHECK_THROWS(ErrorCode::invalid,
                     other->submit_read(dir / "g", into.plan, into.buffers(), ahead.get()));
        executor->close();
        CHECK_THROWS(ErrorCode::closed, executor->read_ahead(dir / "f", two));
    }
}

TEST(outlives_what_it_is_of) {
    std::mt19937_64 random(8);
    for (const support::Setup& setup : direct_setups()) {
        for (const bool waits : {false, true}) {
            const support::TempDir dir(setup);
            auto executor = support::make_executor(setup, 32, kBlock);
            const WriteCase written = make_case(random);
            if (!write_cold(dir / "f", written.expected)) continue;
            const ReadCase read = ReadCase::make(written, kExtent, 0);
            auto ahead = executor->read_ahead(dir / "f", first_of(*read.plan));
            if (waits) ahead->wait();
            executor->close();
            executor.reset();
            ahead.reset();
        }
    }
}

CHECK_MAIN()
