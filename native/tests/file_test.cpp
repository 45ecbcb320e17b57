#include <unistd.h>

#include <bit>
#include <cerrno>
#include <filesystem>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/page.hpp"
#include "datastates/io/descriptor_file.hpp"
#include "support.hpp"

using namespace datastates;

TEST(create_refuses_what_exists) {
    const support::TempDir dir;
    {
        DescriptorFile::create(dir / "a", true);
    }
    try {
        DescriptorFile::create(dir / "a", true);
        CHECK(false);
    } catch (const Error& error) {
        CHECK(error.code() == ErrorCode::io);
        CHECK_EQ(error.error_number(), EEXIST);
        CHECK_EQ(error.op(), "open");
        CHECK_EQ(error.path(), dir / "a");
    }
    CHECK_THROWS(ErrorCode::io, DescriptorFile::open(dir / "missing", true));
}

TEST(falls_back_where_there_is_no_direct_io) {
    // procfs refuses O_DIRECT.
    const DescriptorFile file = DescriptorFile::open("/proc/self/status", true);
    CHECK(!file.direct());
}

TEST(allocate_write_close) {
    const support::TempDir dir;
    for (const bool direct : {true, false}) {
        const std::string path = dir / (direct ? "direct" : "buffered");
        DescriptorFile file = DescriptorFile::create(path, direct);
        CHECK(file.allocate(0, 10000));
        CHECK_EQ(file.size(), 10000U);
        std::mt19937_64 random(1);
        const auto data = support::random_bytes(random, 5000);
        file.write_all(data, 1);
        file.write_all(data, 5001);
        file.sync();
        file.close_written(10001);
        auto expected = data;
        expected.insert(expected.begin(), std::byte{0});
        expected.insert(expected.end(), data.begin(), data.end());
        CHECK(support::read_file(path) == expected);
    }
}

TEST(knows_what_is_cached) {
    const support::TempDir dir;
    support::write_file(dir / "a", support::Bytes(40000));
    const DescriptorFile file = DescriptorFile::open(dir / "a", true);
    CHECK(!file.traits().in_memory);
    CHECK(file.cached(0, 0));
    const auto cached = [&](std::uint64_t offset, std::uint64_t nbytes) {
        bool told = false;  // the kernel may miss a page that it is moving
        for (int i = 0; i < 100 && !told; ++i) told = file.cached(offset, nbytes);
        return told;
    };
    const bool told = cached(0, 40000);
    if (!told) std::cout << "SKIPPED: the kernel does not tell what is cached\n" << std::flush;
    CHECK_EQ(cached(4095, 2), told);
    support::drop_cache(dir / "a");
    CHECK(!file.cached(0, 40000));
    CHECK(!file.cached(8192, 1));
}

TEST(pages_are_counted_in_the_systems_size) {
    static_assert(pages_touched(0, 40000, 4096) == 10);
    static_assert(pages_touched(0, 40000, 65536) == 1);
    static_assert(pages_touched(65535, 2, 65536) == 2);
    static_assert(pages_touched(65536, 65536, 65536) == 1);
    CHECK(page_size() >= 4096 && std::has_single_bit(page_size()));
}

TEST(the_same_file_again) {
    const support::TempDir dir;
    const support::FaultScope scope;
    const support::Bytes data(1000, std::byte{7});
    support::write_file(dir / "a", data);
    const DescriptorFile file = DescriptorFile::open(dir / "a", true);
    std::filesystem::remove(dir / "a");
    support::write_file(dir / "a", support::Bytes(1000, std::byte{8}));
    const auto again = file.again();
    CHECK(again.has_value());
    support::Bytes found(1000);
    CHECK_EQ(::pread(again->buffered_fd(), found.data(), found.size(), 0), 1000);
    CHECK(found == data);
    CHECK_EQ(again->path(), file.path());
    fault::arm("open", "fail", EMFILE, 1, 1);
    CHECK(!file.again());
}

TEST(faults) {
    const support::TempDir dir;
    const support::FaultScope scope;
    fault::arm("open", "eintr", 0, 1, 1);
    DescriptorFile file = DescriptorFile::create(dir / "a", false);
    fault::arm("open", "fail", EMFILE, 1, 1);
    CHECK_THROWS(ErrorCode::io, DescriptorFile::create(dir / "b", false));
    fault::arm("allocate", "fail", ENOSPC, 1, 1);
    CHECK_THROWS(ErrorCode::io, file.allocate(0, 4096));
    fault::arm("allocate", "fail", EDQUOT, 1, 1);
    CHECK_THROWS(ErrorCode::io, file.allocate(0, 4096));
    for (const int other : {EOPNOTSUPP, EIO, ERANGE, EPERM}) {
        fault::arm("allocate", "fail", other, 1, 1);
        CHECK(!file.allocate(0, 4096));
    }
    fault::arm("sync", "fail", EIO, 1, 1);
    CHECK_THROWS(ErrorCode::io, file.sync());
    fault::arm("sync", "eintr", 0, 1, 1);
    file.sync();
    fault::arm("write", "short", 0, 1, 0);
    const support::Bytes data(1000, std::byte{7});
    file.write_all(data, 0);
    CHECK(support::read_file(dir / "a") == data);
    fault::arm("close", "fail", EDQUOT, 1, 1);
    CHECK_THROWS(ErrorCode::io, file.close_written(1000));
    CHECK_EQ(file.buffered_fd(), -1);
}

TEST(a_file_of_another_length_than_written_is_refused) {
    const support::TempDir dir;
    for (const std::uintmax_t length : {999, 4096}) {
        const std::string path = dir / std::to_string(length);
        DescriptorFile file = DescriptorFile::create(path, true);
        file.write_all(support::Bytes(1000, std::byte{7}), 0);
        file.sync();
        std::filesystem::resize_file(path, length);
        try {
            file.close_written(1000);
            CHECK(false);
        } catch (const Error& error) {
            CHECK(error.code() == ErrorCode::io);
            CHECK_EQ(error.error_number(), EIO);
            CHECK_EQ(error.path(), path);
            const std::string message = error.what();
            CHECK(message.find(std::to_string(length) + " bytes after 1000") != std::string::npos);
        }
    }
}

TEST(what_is_let_go_leaves_the_page_tables) {
    const support::TempDir dir({.backend = "pwrite", .direct = false, .memory = true});
    constexpr long kPart = 5'000'000;
    constexpr long kUnused = 1000;  // between two parts
    constexpr long kLength = 40 * kPart;
    support::write_file(dir / "f", support::Bytes(kLength, std::byte{3}));
    const DescriptorFile file = DescriptorFile::open(dir / "f", true);
    CHECK_EQ(file.memory().size(), std::size_t{kLength});
    const auto mapped = [] { return 1024 * support::process_status("RssShmem"); };
    const long before = mapped();
    long most = 0;
    for (long at = 0; at < kLength; at += kPart) {
        for (long i = at; i < at + kPart; i += 4096) {
            CHECK(file.memory()[i] == std::byte{3});
        }
        most = std::max(most, mapped() - before);
        file.let_go(at, kPart - kUnused);
    }
    CHECK(most > kPart);
    CHECK(most < kLength / 2);
    CHECK(mapped() - before < kLength / 8);
}

CHECK_MAIN()
