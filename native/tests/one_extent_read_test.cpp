#include <array>
#include <chrono>
#include <memory>
#include <thread>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;

namespace {

constexpr std::size_t kPage = 4096;

/// One extent without gaps. Each destination gets a part of it.
std::shared_ptr<ReadPlan> one_extent(std::uint64_t offset, std::uint64_t length,
                                     const std::vector<std::uint64_t>& at,
                                     const std::vector<std::uint64_t>& nbytes,
                                     const std::vector<std::uint64_t>& check_at,
                                     const std::vector<std::uint64_t>& check_nbytes,
                                     const std::vector<std::uint32_t>& crc,
                                     std::uint8_t shared = 0) {
    const std::vector<std::uint64_t> zero = {0, 0}, first_and_end = {0, 1}, pieces = {0, 2},
                                     checks = {0, crc.size()};
    const std::vector<std::int32_t> dest = {0, 1}, record(crc.size());
    return support::plan_of_single(ReadPlanArrays{.dest_nbytes = nbytes,
                                                  .extent_offset = {&offset, 1},
                                                  .extent_length = {&length, 1},
                                                  .extent_shared = {&shared, 1},
                                                  .extent_span = first_and_end,
                                                  .span_offset = {zero.data(), 1},
                                                  .span_length = {&length, 1},
                                                  .extent_piece = pieces,
                                                  .piece_dest = dest,
                                                  .piece_dest_offset = zero,
                                                  .piece_extent_offset = at,
                                                  .piece_length = nbytes,
                                                  .extent_check = checks,
                                                  .check_offset = check_at,
                                                  .check_length = check_nbytes,
                                                  .check_crc = crc,
                                                  .check_record = record});
}

Buffers host_buffers(Bytes& first, Bytes& second) {
    return {.address = {reinterpret_cast<std::uint64_t>(first.data()),
                        reinterpret_cast<std::uint64_t>(second.data())},
            .device = {-1, -1},
            .stream = {0, 0},
            .witness = {}};
}

std::size_t cached_pages(const DescriptorFile& file, std::size_t nbytes) {
    std::size_t pages = 0;
    for (std::size_t at = 0; at < nbytes; at += kPage) pages += file.cached(at, 1) ? 1 : 0;
    return pages;
}

}  // namespace

/// Reads one extent into two destinations with a gap between them, and a check over each. What is
/// in the page cache goes straight to both.
TEST(one_extent_for_many_destinations) {
    std::mt19937_64 random(8);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 1, std::size_t{1} << 20);
        const Bytes file = support::random_bytes(random, 900000);
        support::write_file(dir / "f", file);
        const std::span<const std::byte> all(file);
        const std::vector<std::uint64_t> nbytes = {300000, 500001};
        const std::vector<std::uint64_t> at = {17, 390001};  // in the extent
        constexpr std::uint64_t kOffset = 5000, kLength = 890002;
        for (const bool cached : {true, false}) {
            if (!cached) support::drop_cache(dir / "f");
            for (const bool flipped : {false, true}) {
                std::vector<std::uint32_t> crc;
                for (std::size_t i = 0; i < 2; ++i) {
                    crc.push_back(crc32(0, all.subspan(kOffset + at[i], nbytes[i])));
                }
                if (flipped) crc[1] ^= 1U;
                const auto plan = one_extent(kOffset, kLength, at, nbytes, at, nbytes, crc);
                Bytes first(nbytes[0]), second(nbytes[1]);
                const Buffers buffers = host_buffers(first, second);
                const auto job = executor->submit_read(dir / "f", plan, buffers);
                if (flipped) {
                    CHECK_THROWS(ErrorCode::corrupt, job->wait());
                    const bool straight = job->stats().cached_bytes > 0;
                    CHECK(straight || second == Bytes(nbytes[1]));
                    continue;
                }
                CHECK(job->wait());
                const ReadStats stats = job->stats();
                CHECK_EQ(stats.in_place_bytes, stats.cached_bytes > 0 ? nbytes[0] + nbytes[1] : 0U);
                CHECK(std::ranges::equal(first, all.subspan(kOffset + at[0], nbytes[0])));
                CHECK(std::ranges::equal(second, all.subspan(kOffset + at[1], nbytes[1])));
            }
        }
    }
}

TEST(a_long_extent_passes_through_a_window) {
    std::mt19937_64 random(7);
    constexpr std::uint64_t kLength = std::uint64_t{11} << 20;
    constexpr std::uint64_t kCheck = 250000;
    const Bytes file = support::random_bytes(random, kLength + 4096);
    const std::uint64_t offset = 1000;
    const auto data = std::span(file).subspan(offset, kLength);
    std::vector<std::uint64_t> check_at, check_nbytes;
    std::vector<std::uint32_t> crc;
    for (std::uint64_t at = 3000; at < kLength; at += kCheck + (at / 5 % 7 * 1000)) {
        check_at.push_back(at);
        check_nbytes.push_back(std::min(kCheck, kLength - at));
        crc.push_back(crc32(0, data.subspan(at, check_nbytes.back())));
    }
    // The pieces overlap.
    const std::vector<std::uint64_t> at = {10, 5'000'001}, nbytes = {6'000'000, 6'000'007};
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, std::size_t{12} << 20);
        support::write_file(dir / "f", file);
        for (const bool cold : {false, true}) {
            if (cold) support::drop_cache(dir / "f");
            Bytes first(nbytes[0]), second(nbytes[1]);
            const auto plan = one_extent(offset, kLength, at, nbytes, check_at, check_nbytes, crc);
            CHECK(executor->submit_read(dir / "f", plan, host_buffers(first, second))->wait());
            CHECK(std::ranges::equal(first, data.subspan(at[0], nbytes[0])));
            CHECK(std::ranges::equal(second, data.subspan(at[1], nbytes[1])));
        }
        Bytes damaged = file;
        damaged[offset + kLength - 1] ^= std::byte{1};
        support::write_file(dir / "f", damaged);
        Bytes first(nbytes[0]), second(nbytes[1]);
        const auto plan = one_extent(offset, kLength, at, nbytes, check_at, check_nbytes, crc);
        CHECK_THROWS(ErrorCode::corrupt,
                     executor->submit_read(dir / "f", plan, host_buffers(first, second))->wait());
    }
}

/// Checks overlap, and so may destinations. Bytes that any of their checks refuses are not copied.
TEST(nothing_is_put_in_place_unverified) {
    using Offsets = std::vector<std::uint64_t>;
    std::mt19937_64 random(12);
    const Bytes file = support::random_bytes(random, 400000);
    const Offsets check_at = {0, 90000, 130000}, check_nbytes = {100000, 60000, 170000};
    const auto read_with_bad = [&](std::size_t bad, Executor& executor, const std::string& path,
                                   const Offsets& at, const Offsets& dests) {
        std::vector<std::uint32_t> crc;
        for (std::size_t i = 0; i < 3; ++i) {
            const auto part = std::span(file).subspan(check_at[i], check_nbytes[i]);
            crc.push_back(crc32(0, part) ^ (i == bad ? 1U : 0U));
        }
        const auto plan = one_extent(0, 300000, at, dests, check_at, check_nbytes, crc);
        Bytes first(dests[0]), second(dests[1]);
        const Buffers buffers = host_buffers(first, second);
        const auto job = executor.submit_read(path, plan, buffers);
        std::uint64_t good = 300000;
        if (bad < 3) {
            CHECK_THROWS(ErrorCode::corrupt, job->wait());
            good = check_at[bad];
        } else {
            CHECK(job->wait());
        }
        Bytes expected = file;
        std::fill(expected.begin() + static_cast<std::ptrdiff_t>(good), expected.end(),
                  std::byte{0});
        CHECK(std::ranges::equal(first, std::span(expected).first(dests[0])));
        CHECK(std::ranges::equal(second, std::span(expected).subspan(at[1], dests[1])));
    };
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 1, std::size_t{1} << 20);
        support::write_file(dir / "f", file);
        for (const bool cached : {true, false}) {
            for (std::size_t bad = 0; bad <= 3; ++bad) {
                if (!cached) support::drop_cache(dir / "f");
                read_with_bad(bad, *executor, dir / "f", {0, 50000}, {300000, 100000});
                if (!cached) support::drop_cache(dir / "f");
                read_with_bad(bad, *executor, dir / "f", {0, 280000}, {280000, 20000});
            }
        }
    }
}

TEST(reads_shared_extents_into_the_page_cache) {
    std::mt19937_64 random(15);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 1, std::size_t{4} << 20);
        const Bytes bytes = support::random_bytes(random, 3000000);
        support::write_file(dir / "f", bytes);
        const DescriptorFile file = DescriptorFile::open(dir / "f", setup.direct);
        if (!file.cached(0, bytes.size())) {
            std::cout << "SKIPPED: the kernel does not tell what is cached\n" << std::flush;
            continue;
        }
        const std::vector<std::uint64_t> dests = {2000000, 1000000}, at = {0, 2000000};
        const std::vector<std::uint64_t> check_at = {0}, check_nbytes = {bytes.size()};
        for (const std::uint8_t shared : {0, 1}) {
            support::drop_cache(dir / "f");
            const auto plan = one_extent(0, bytes.size(), at, dests, check_at, check_nbytes,
                                         {crc32(0, bytes)}, shared);
            Bytes first(dests[0]), second(dests[1]);
            CHECK(executor->submit_read(dir / "f", plan, host_buffers(first, second))->wait());
            CHECK(std::ranges::equal(first, std::span(bytes).first(dests[0])));
            CHECK(std::ranges::equal(second, std::span(bytes).subspan(at[1])));
            // The kernel may miss a page that it is moving, and may drop some.
            const std::size_t pages = cached_pages(file, bytes.size());
            CHECK(shared == 1 || !file.direct() ? pages > 0 : pages < bytes.size() / kPage);
        }
    }
}

/// The only block is held by one job while the other one reads.
TEST(two_cached_extents_share_a_block) {
    std::mt19937_64 random(16);
    constexpr std::size_t kBlock = std::size_t{256} << 10;
    const std::vector<std::uint64_t> at = {0, 60000}, nbytes = {60000, 40001};
    const support::TempDir dir;
    const support::FaultScope scope;
    const auto executor = support::make_executor({.backend = "pwrite", .direct = true}, 1, kBlock);
    const Bytes file = support::random_bytes(random, 100001);
    support::write_file(dir / "f", file);
    if (!DescriptorFile::open(dir / "f", true).cached(0, file.size())) {
        std::cout << "SKIPPED: the kernel does not tell what is cached\n" << std::flush;
        return;
    }
    const auto plan = one_extent(0, file.size(), at, nbytes, {0}, {file.size()}, {crc32(0, file)});
    std::array<Bytes, 2> first{Bytes(nbytes[0]), Bytes(nbytes[0])};
    std::array<Bytes, 2> second{Bytes(nbytes[1]), Bytes(nbytes[1])};
    fault::arm("read", "delay", support::kHeld, 1, 1);
    const auto one = executor->submit_read(dir / "f", plan, host_buffers(first[0], second[0]));
    const auto other = executor->submit_read(dir / "f", plan, host_buffers(first[1], second[1]));
    while (!one->wait(Clock::now()) && !other->wait(Clock::now())) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK(!one->wait(Clock::now()) || !other->wait(Clock::now()));
    fault::clear();
    CHECK(one->wait());
    CHECK(other->wait());
    for (const std::size_t i : {0, 1}) {
        CHECK(std::ranges::equal(first[i], std::span(file).first(nbytes[0])));
        CHECK(std::ranges::equal(second[i], std::span(file).subspan(at[1])));
    }
}

/// A check over more than half of a block needs all of its bytes at once.
TEST(a_long_check_takes_a_whole_block) {
    std::mt19937_64 random(17);
    constexpr std::size_t kBlock = std::size_t{8} << 20;
    constexpr int kJobs = 8;
    const std::vector<std::uint64_t> at = {0, 1000}, nbytes = {1000, (std::size_t{5} << 20) + 1};
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        const Bytes file = support::random_bytes(random, at[1] + nbytes[1]);
        support::write_file(dir / "f", file);
        const auto plan =
            one_extent(0, file.size(), at, nbytes, {0}, {file.size()}, {crc32(0, file)});
        std::vector<Bytes> first(kJobs, Bytes(nbytes[0])), second(kJobs, Bytes(nbytes[1]));
        std::vector<std::unique_ptr<ReadJob>> jobs;
        for (int i = 0; i < kJobs; ++i) {
            jobs.push_back(
                executor->submit_read(dir / "f", plan, host_buffers(first[i], second[i])));
        }
        for (int i = 0; i < kJobs; ++i) {
            CHECK(jobs[i]->wait());
            CHECK(std::ranges::equal(first[i], std::span(file).first(nbytes[0])));
            CHECK(std::ranges::equal(second[i], std::span(file).subspan(at[1])));
        }
    }
}

CHECK_MAIN()
