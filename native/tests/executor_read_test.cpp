#include <cerrno>
#include <map>

#include "check.hpp"
#include "datastates/base/error.hpp"
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
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        executor->submit_write(dir / "f", written.plan, written.buffers())->finish({});
        for (const std::size_t shift : {0, 1, 64}) {
            for (const std::size_t extent : {kBlock - 8192, std::size_t{100000}}) {
                support::drop_cache(dir / "f");
                ReadCase read = ReadCase::make(written, extent, shift);
                const auto job = executor->submit_read(dir / "f", read.plan, read.buffers());
                CHECK(job->wait());
                check_read(read, written);
                const ReadStats stats = job->stats();
                CHECK_EQ(stats.bytes_needed, read.plan->bytes());
                CHECK(stats.bytes_read >= stats.bytes_needed);
                CHECK_EQ(stats.direct, setup.direct && !setup.memory);
                CHECK_EQ(job->backend_name(), setup.memory ? "memory" : setup.backend);
                if (!stats.direct) CHECK_EQ(stats.in_place_bytes, stats.bytes_needed);
                // Small extents are read into the page cache, so others on their pages are cached.
                if (stats.direct) CHECK(stats.cached_bytes < 4096);
                if (setup.memory) CHECK_EQ(stats.cached_bytes, stats.bytes_needed);
            }
        }
    }
}

TEST(reads_what_is_cached_without_the_device) {
    std::mt19937_64 random(7);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        support::write_file(dir / "f", written.expected);
        if (!DescriptorFile::open(dir / "f", false).cached(0, written.expected.size())) {
            std::cout << "SKIPPED: the kernel does not tell what is cached\n" << std::flush;
            continue;
        }
        for (const std::size_t shift : {0, 3}) {
            ReadStats stats;
            // The kernel may miss a page that it is moving, or drop one, so try several times.
            for (int i = 0; i == 0 || (i < 5 && stats.cached_bytes < stats.bytes_needed); ++i) {
                CHECK(support::read_file(dir / "f") == written.expected);
                ReadCase read = ReadCase::make(written, 100000, shift);
                const auto job = executor->submit_read(dir / "f", read.plan, read.buffers());
                CHECK(job->wait());
                check_read(read, written);
                stats = job->stats();
            }
            CHECK_EQ(stats.cached_bytes, stats.bytes_needed);
            CHECK_EQ(stats.bytes_read, stats.bytes_needed);
            CHECK_EQ(stats.in_place_bytes, stats.bytes_needed);
        }
    }
}

/// An extent of spans with gaps between them. Only the spans are read. One of them has a check.
TEST(reads_the_spans_of_a_sparse_extent_only) {
    std::mt19937_64 random(10);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 1, std::size_t{1} << 20);
        const Bytes file = support::random_bytes(random, 900000);
        support::write_file(dir / "f", file);
        const std::span<const std::byte> all(file);
        constexpr std::uint64_t kOffset = 5001;
        const std::vector<std::uint64_t> at = {0, 300, 70000}, nbytes = {100, 60001, 5};
        const std::vector<std::uint64_t> offset = {kOffset}, length = {at[2] + nbytes[2]};
        const std::vector<std::uint64_t> spans = {0, 3}, one = {0, 1}, zero = {0}, sum = {60106};
        const std::vector<std::uint64_t> dest_at = {0, 100, 60101};
        const std::vector<std::int32_t> dest = {0, 0, 0}, record = {3};
        for (const bool cached : {true, false}) {
            for (const bool flipped : {false, true}) {
                if (!cached) support::drop_cache(dir / "f");
                const std::vector<std::uint32_t> crc = {
                    crc32(0, all.subspan(kOffset + at[1], nbytes[1])) ^ (flipped ? 1U : 0U)};
                const auto plan =
                    support::plan_of_single(ReadPlanArrays{.dest_nbytes = sum,
                                                           .extent_offset = offset,
                                                           .extent_length = length,
                                                           .extent_span = spans,
                                                           .span_offset = at,
                                                           .span_length = nbytes,
                                                           .extent_piece = spans,
                                                           .piece_dest = dest,
                                                           .piece_dest_offset = dest_at,
                                                           .piece_extent_offset = at,
                                                           .piece_length = nbytes,
                                                           .extent_check = one,
                                                           .check_offset = {at.data() + 1, 1},
                                                           .check_length = {nbytes.data() + 1, 1},
                                                           .check_crc = crc,
                                                           .check_record = record});
                CHECK_EQ(plan->bytes(), sum[0]);
                Bytes out(sum[0]);
                const Buffers buffers{.address = {reinterpret_cast<std::uint64_t>(out.data())},
                                      .device = {-1},
                                      .stream = {0},
                                      .witness = {}};
                const auto job = executor->submit_read(dir / "f", plan, buffers);
                if (flipped) {
                    CHECK_THROWS(ErrorCode::corrupt, job->wait());
                    continue;
                }
                CHECK(job->wait());
                CHECK_EQ(job->stats().bytes_needed, sum[0]);
                CHECK_EQ(job->stats().bytes_read, sum[0]);
                CHECK_EQ(support::bytes_of(job->timeline(), Stage::read), sum[0]);
                for (std::size_t i = 0; i < 3; ++i) {
                    CHECK(std::ranges::equal(std::span(out).subspan(dest_at[i], nbytes[i]),
                                             all.subspan(kOffset + at[i], nbytes[i])));
                }
            }
        }
    }
}

/// Columns of the rows of a matrix, to rows of another one. The last rows lie in a verified part.
TEST(reads_what_is_equally_spaced) {
    std::mt19937_64 random(14);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 1, std::size_t{4} << 20);
        const Bytes file = support::random_bytes(random, 4000000);
        support::write_file(dir / "f", file);
        const std::span<const std::byte> all(file);
        constexpr std::uint64_t kOffset = 777, kRows = 3000, kLoose = 2900, kRow = 300,
                                kPitch = 1024, kDestPitch = 301;
        const std::vector<std::uint64_t> offset = {kOffset}, length = {kRows * kPitch}, zero = {0},
                                         one = {0, 1}, two = {0, 2};
        const std::vector<std::uint64_t> span_at = {0, kLoose * kPitch},
                                         span_length = {kRow, (kRows - kLoose) * kPitch},
                                         span_count = {kLoose, 1}, span_step = {kPitch, 0};
        const std::vector<std::uint64_t> rows = {kRows}, row = {kRow}, pitch = {kPitch},
                                         dest_pitch = {kDestPitch}, nbytes = {kRows * kDestPitch};
        const std::vector<std::uint32_t> crc = {
            crc32(0, all.subspan(kOffset + span_at[1], span_length[1]))};
        const std::vector<std::int32_t> record = {0};
        const std::vector<std::uint8_t> direct = {0};
        const auto plan =
            std::make_shared<ReadPlan>(ReadPlanArrays{.dest_nbytes = nbytes,
                                                      .extent_offset = offset,
                                                      .extent_length = length,
                                                      .extent_shared = direct,
                                                      .extent_span = two,
                                                      .span_offset = span_at,
                                                      .span_length = span_length,
                                                      .span_count = span_count,
                                                      .span_step = span_step,
                                                      .extent_piece = one,
                                                      .piece_dest = record,
                                                      .piece_dest_offset = zero,
                                                      .piece_extent_offset = zero,
                                                      .piece_length = row,
                                                      .piece_count = rows,
                                                      .piece_extent_step = pitch,
                                                      .piece_dest_step = dest_pitch,
                                                      .extent_check = one,
                                                      .check_offset = {&span_at[1], 1},
                                                      .check_length = {&span_length[1], 1},
                                                      .check_crc = crc,
                                                      .check_record = record});
        CHECK_EQ(plan->bytes(), kLoose * kRow + span_length[1]);
        for (const bool cached : {true, false}) {
            if (!cached) support::drop_cache(dir / "f");
            Bytes out(nbytes[0], std::byte{7});
            const Buffers buffers{.address = {reinterpret_cast<std::uint64_t>(out.data())},
                                  .device = {-1},
                                  .stream = {0},
                                  .witness = {}};
            const auto job = executor->submit_read(dir / "f", plan, buffers);
            CHECK(job->wait());
            CHECK_EQ(job->stats().bytes_read, plan->bytes());
            for (std::size_t i = 0; i < kRows; ++i) {
                CHECK(std::ranges::equal(std::span(out).subspan(i * kDestPitch, kRow),
                                         all.subspan(kOffset + (i * kPitch), kRow)));
                CHECK(out[(i * kDestPitch) + kRow] == std::byte{7});
            }
        }
        Bytes damaged = file;
        damaged[kOffset + (kRows * kPitch) - 1] ^= std::byte{1};
        support::write_file(dir / "f", damaged);
        Bytes out(nbytes[0]);
        const Buffers buffers{.address = {reinterpret_cast<std::uint64_t>(out.data())},
                              .device = {-1},
                              .stream = {0},
                              .witness = {}};
        CHECK_THROWS(ErrorCode::corrupt, executor->submit_read(dir / "f", plan, buffers)->wait());
    }
}

/// Widening small reads to whole pages would read much more than they need.
TEST(small_reads_are_not_widened) {
    std::mt19937_64 random(11);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 1, kBlock);
        WriteCase written;
        written.sources = {support::random_bytes(random, 90001)};
        written.source_at = {5000};
        written.order = {0};
        Bytes file(5000);
        file.insert(file.end(), written.sources[0].begin(), written.sources[0].end());
        support::write_file(dir / "f", file);
        support::drop_cache(dir / "f");
        ReadCase read = ReadCase::make(written, kBlock - 8192, 0);
        const auto job = executor->submit_read(dir / "f", read.plan, read.buffers());
        CHECK(job->wait());
        check_read(read, written);
        CHECK_EQ(job->stats().bytes_read, 90001U);
    }
}

TEST(timelines_add_up) {
    std::mt19937_64 random(9);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        support::write_file(dir / "f", written.expected);
        for (const bool cached : {true, false}) {
            if (!cached) support::drop_cache(dir / "f");
            ReadCase read = ReadCase::make(written, 100000, 1);
            const auto before = Clock::now();
            const auto job = executor->submit_read(dir / "f", read.plan, read.buffers());
            CHECK(job->wait());
            const auto after = Clock::now();
            std::map<std::pair<Stage, std::uint32_t>, Clock::time_point> busy;
            std::vector<Span> spans = job->timeline().spans();
            std::ranges::sort(spans, {}, &Span::begin);
            for (const Span& span : spans) {
                CHECK(before <= span.begin && span.begin <= span.end && span.end <= after);
                auto& until = busy[{span.stage, span.track}];
                CHECK(until <= span.begin);
                until = span.end;
            }
            const ReadStats stats = job->stats();
            const auto bytes = [&](Stage stage) {
                return support::bytes_of(job->timeline(), stage);
            };
            CHECK_EQ(bytes(Stage::read), stats.bytes_needed);
            CHECK_EQ(bytes(Stage::verify), stats.bytes_needed);
            CHECK_EQ(bytes(Stage::copy), stats.bytes_needed - stats.in_place_bytes);
        }
    }
}

TEST(direct_reads_in_place_where_aligned) {
    std::mt19937_64 random(2);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 1, kBlock);
        WriteCase written;
        written.sources = {support::random_bytes(random, 200001)};
        written.source_at = {8192};
        written.order = {0};
        Bytes file(8192);
        file.insert(file.end(), written.sources[0].begin(), written.sources[0].end());
        support::write_file(dir / "f", file);
        support::drop_cache(dir / "f");
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
        const support::TempDir dir(setup);
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        Bytes file = written.expected;
        file[written.source_at[4] + 299999] ^= std::byte{1};
        file[written.source_at[0] + 500000] ^= std::byte{128};
        support::write_file(dir / "f", file);
        for (const bool cached : {true, false}) {
            if (!cached) support::drop_cache(dir / "f");
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
}

TEST(truncated_files_are_corrupt) {
    std::mt19937_64 random(4);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
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
        const support::TempDir dir(setup);
        const support::FaultScope scope;
        const auto executor = support::make_executor(setup, 2, kBlock);
        const WriteCase written = make_case(random);
        support::write_file(dir / "f", written.expected);
        for (std::uint64_t nth = 1; nth <= 10; ++nth) {
            if (nth == 6) support::drop_cache(dir / "f");  // from here on read from the storage
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
        const support::TempDir dir(setup);
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
