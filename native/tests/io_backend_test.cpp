#include "datastates/io/io_backend.hpp"

#include <cerrno>
#include <filesystem>
#include <map>
#include <optional>
#include <thread>

#include "check.hpp"
#include "support.hpp"

/// The conformance suite: every case runs on both backends, direct and buffered.
using namespace datastates;
using support::Aligned;
using support::Bytes;

namespace {

struct Bench {
    support::Setup setup;
    support::TempDir dir;
    std::unique_ptr<IoBackend> backend = make_backend(setup.backend, 4, 3);

    std::map<std::uint64_t, IoCompletion> drain() const {
        std::map<std::uint64_t, IoCompletion> done;
        while (backend->in_flight() > 0) {
            for (const auto& completion : backend->reap(true)) {
                CHECK(done.emplace(completion.token, completion).second);
            }
        }
        return done;
    }
    IoCompletion one(IoKind kind, File& file, std::byte* buffer, std::size_t length,
                     std::uint64_t offset, std::size_t required) const {
        backend->submit({.kind = kind,
                         .file = &file,
                         .buffer = buffer,
                         .length = length,
                         .required = required,
                         .offset = offset,
                         .token = 42});
        const auto done = drain();
        CHECK_EQ(done.size(), 1U);
        CHECK_EQ(done.begin()->first, 42U);
        return done.begin()->second;
    }
    IoCompletion write(File& file, Aligned& memory, std::size_t length,
                       std::uint64_t offset) const {
        return one(IoKind::write, file, memory.data(), length, offset, length);
    }
};

template <typename Body>
void on_all(Body&& body) {
    for (const support::Setup& setup : support::setups()) {
        const support::FaultScope scope;
        const Bench bench{.setup = setup, .dir = support::TempDir(setup)};
        CHECK_EQ(bench.backend->name(), setup.backend);
        body(bench);
    }
}

Aligned filled(const Bytes& bytes, std::size_t shift = 0) {
    Aligned memory(bytes.size(), shift);
    std::memcpy(memory.data(), bytes.data(), bytes.size());
    return memory;
}

constexpr std::size_t kSize = 64 * 4096;

}  // namespace

TEST(many_requests_at_offsets) {
    on_all([](const Bench& bench) {
        std::mt19937_64 random(1);
        const Bytes data = support::random_bytes(random, kSize);
        Aligned from = filled(data);
        DescriptorFile file = DescriptorFile::create(bench.dir / "f", bench.setup.direct);
        // Register in pieces, the second one later.
        bench.backend->register_memory({from.data(), kSize / 2}, kSize / 2);
        bench.backend->register_memory({from.data(), kSize}, kSize / 2);
        std::vector<std::size_t> pages(64);
        for (std::size_t i = 0; i < 64; ++i) pages[i] = i;
        std::shuffle(pages.begin(), pages.end(), random);
        for (const std::size_t page : pages) {
            bench.backend->submit({.kind = IoKind::write,
                                   .file = &file,
                                   .buffer = from.data() + (page * 4096),
                                   .length = 4096,
                                   .required = 4096,
                                   .offset = page * 4096,
                                   .token = page});
        }
        CHECK_EQ(bench.backend->in_flight(), 64U);
        const auto written = bench.drain();
        CHECK_EQ(written.size(), 64U);
        for (const auto& [token, completion] : written) CHECK(completion.ok());
        CHECK(support::read_file(bench.dir / "f") == data);

        DescriptorFile source = DescriptorFile::open(bench.dir / "f", bench.setup.direct);
        Aligned to(kSize);
        for (const std::size_t page : pages) {
            bench.backend->submit({.kind = IoKind::read,
                                   .file = &source,
                                   .buffer = to.data() + (page * 4096),
                                   .length = 4096,
                                   .required = 4096,
                                   .offset = page * 4096,
                                   .token = page});
        }
        CHECK_EQ(bench.drain().size(), 64U);
        CHECK(std::equal(data.begin(), data.end(), to.data()));
    });
}

TEST(unaligned_everything) {
    on_all([](const Bench& bench) {
        std::mt19937_64 random(2);
        const Bytes data = support::random_bytes(random, 30001);
        Aligned from = filled(data, 3);
        DescriptorFile file = DescriptorFile::create(bench.dir / "f", bench.setup.direct);
        CHECK(bench.write(file, from, data.size(), 4097).ok());
        const Bytes whole = support::read_file(bench.dir / "f");
        CHECK(std::equal(data.begin(), data.end(), whole.begin() + 4097));
        DescriptorFile source = DescriptorFile::open(bench.dir / "f", bench.setup.direct);
        Aligned to(data.size(), 5);
        CHECK(bench.one(IoKind::read, source, to.data(), data.size(), 4097, data.size()).ok());
        CHECK(std::equal(data.begin(), data.end(), to.data()));
    });
}

TEST(short_transfers_are_continued) {
    on_all([](const Bench& bench) {
        std::mt19937_64 random(3);
        const Bytes data = support::random_bytes(random, kSize);
        Aligned from = filled(data);
        DescriptorFile file = DescriptorFile::create(bench.dir / "f", bench.setup.direct);
        fault::arm("write", "short", 0, 1, 0);
        const IoCompletion written = bench.write(file, from, kSize, 0);
        CHECK(written.ok());
        CHECK_EQ(written.transferred, kSize);
        CHECK(support::read_file(bench.dir / "f") == data);
        DescriptorFile source = DescriptorFile::open(bench.dir / "f", bench.setup.direct);
        Aligned to(kSize);
        fault::arm("read", "short", 0, 1, 0);
        CHECK(bench.one(IoKind::read, source, to.data(), kSize, 0, kSize).ok());
        CHECK(std::equal(data.begin(), data.end(), to.data()));
    });
}

TEST(interrupts_are_retried) {
    on_all([](const Bench& bench) {
        Aligned memory(8192);
        DescriptorFile file = DescriptorFile::create(bench.dir / "f", bench.setup.direct);
        fault::arm("write", "eintr", 0, 1, 1);
        CHECK(bench.write(file, memory, 8192, 0).ok());
        fault::arm("write", "fail", EAGAIN, 1, 5);
        CHECK(bench.write(file, memory, 8192, 0).ok());
    });
}

TEST(failures_are_reported_and_others_go_on) {
    on_all([](const Bench& bench) {
        Aligned memory(kSize);
        DescriptorFile file = DescriptorFile::create(bench.dir / "f", bench.setup.direct);
        for (const int error : {ENOSPC, EIO}) {
            fault::arm("write", "fail", error, 2, 1);
            for (std::uint64_t i = 0; i < 4; ++i) {
                bench.backend->submit({.kind = IoKind::write,
                                       .file = &file,
                                       .buffer = memory.data(),
                                       .length = 4096,
                                       .required = 4096,
                                       .offset = i * 4096,
                                       .token = i});
            }
            int failed = 0;
            for (const auto& [token, completion] : bench.drain()) {
                if (completion.ok()) continue;
                ++failed;
                CHECK_EQ(completion.error_number, error);
            }
            CHECK_EQ(failed, 1);
        }
    });
}

TEST(the_end_of_the_file) {
    on_all([](const Bench& bench) {
        support::write_file(bench.dir / "f", Bytes(5000, std::byte{9}));
        DescriptorFile file = DescriptorFile::open(bench.dir / "f", bench.setup.direct);
        Aligned memory(8192);
        const IoRequest request{.kind = IoKind::read,
                                .file = &file,
                                .buffer = memory.data(),
                                .length = 8192,
                                .required = 5001,
                                .offset = 0,
                                .token = 1};
        const IoCompletion beyond = bench.one(IoKind::read, file, memory.data(), 8192, 0, 5001);
        CHECK(beyond.end_of_file && !beyond.ok());
        const Error error = io_error(beyond, request);
        CHECK(error.code() == ErrorCode::corrupt);
        CHECK_EQ(error.path(), bench.dir / "f");
        const IoCompletion within = bench.one(IoKind::read, file, memory.data(), 8192, 0, 5000);
        CHECK(within.ok());
        CHECK_EQ(within.transferred, 5000U);
    });
}

TEST(direct_io_that_is_refused_late_goes_on_buffered) {
    on_all([](const Bench& bench) {
        Aligned memory(8192);
        DescriptorFile file = DescriptorFile::create(bench.dir / "f", bench.setup.direct);
        const bool was_direct = file.direct();
        for (const int full : {EIO, ENOSPC, EDQUOT}) {
            fault::arm("write", "fail", full, 1, 1);
            CHECK_EQ(bench.write(file, memory, 8192, 0).error_number, full);
            CHECK_EQ(file.direct(), was_direct);
        }
        for (const int refused : {EINVAL, EOPNOTSUPP, EPERM, ENOTTY}) {
            DescriptorFile another =
                DescriptorFile::create(bench.dir / std::to_string(refused), bench.setup.direct);
            fault::arm("write", "fail", refused, 1, 1);
            CHECK_EQ(bench.write(another, memory, 8192, 0).ok(), was_direct);
            CHECK(!another.direct());
        }
    });
}

TEST(nothing_in_flight_and_empty_requests) {
    on_all([](const Bench& bench) {
        CHECK(bench.backend->reap(true).empty());
        Aligned memory(1);
        DescriptorFile file = DescriptorFile::create(bench.dir / "f", bench.setup.direct);
        CHECK(bench.write(file, memory, 0, 0).ok());
    });
}

TEST(wake_ends_a_wait) {
    on_all([](const Bench& bench) {
        Aligned memory(4096);
        DescriptorFile file = DescriptorFile::create(bench.dir / "f", bench.setup.direct);
        for (int round = 0; round < 50; ++round) {
            const std::jthread waker([&] { bench.backend->wake(); });
            CHECK(bench.write(file, memory, 4096, 0).ok());
        }
    });
}

TEST(destruction_waits_for_what_is_in_flight) {
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        Aligned memory(kSize);
        DescriptorFile file = DescriptorFile::create(dir / "f", setup.direct);
        const auto backend = make_backend(setup.backend, 2, 2);
        for (std::uint64_t i = 0; i < 20; ++i) {
            backend->submit({.kind = IoKind::write,
                             .file = &file,
                             .buffer = memory.data(),
                             .length = kSize,
                             .required = kSize,
                             .offset = i * kSize,
                             .token = i});
        }
    }
}

TEST(stores_at_offsets_of_files_in_memory) {
    for (const support::Setup& setup : support::setups()) {
        if (!setup.memory) continue;
        const support::FaultScope scope;
        const support::TempDir dir(setup);
        std::mt19937_64 random(5);
        const Bytes data = support::random_bytes(random, 100001);
        Aligned from = filled(data, 7);
        constexpr std::uint64_t kOffset = 5000;
        const std::uint64_t end = kOffset + data.size();
        Bytes expected(end);
        std::ranges::copy(data, expected.begin() + kOffset);
        IoRequest request{.kind = IoKind::write,
                          .file = nullptr,
                          .buffer = from.data(),
                          .length = data.size(),
                          .required = data.size(),
                          .offset = kOffset,
                          .token = 3};
        std::optional<DescriptorFile> made;
        const auto make = [&]() -> DescriptorFile& {
            std::filesystem::remove(dir / "f");
            made.emplace(DescriptorFile::create(dir / "f", true));
            request.file = &*made;
            CHECK(made->traits().in_memory);
            CHECK(!made->direct());
            CHECK(made->memory().empty());
            return *made;
        };
        const auto check_stores = [&] {
            const IoCompletion completion = request.file->transfer(request);
            CHECK(completion.ok());
            CHECK_EQ(completion.token, 3U);
            CHECK_EQ(completion.transferred, data.size());
            // The file may be longer, as more was allocated.
            Bytes content = support::read_file(dir / "f");
            CHECK(content.size() >= end);
            content.resize(end);
            CHECK(content == expected);
        };
        for (const auto* action : {"none", "short", "eintr"}) {
            DescriptorFile& file = make();
            CHECK(file.allocate(0, end + 7000));
            file.map(end + 7000);
            if (action != std::string_view("none")) fault::arm("write", action, 0, 1, 0);
            check_stores();
            fault::clear();
            CHECK(std::ranges::equal(file.memory().first(end), expected));
        }
        fault::arm("write", "fail", EIO, 1, 1);
        CHECK_EQ(request.file->transfer(request).error_number, EIO);
        // The mapping is too short, or missing.
        make();
        CHECK(made->allocate(0, end - 1));
        made->map(end - 1);
        check_stores();
        make();
        check_stores();
        request.length = 0;
        CHECK(request.file->transfer(request).ok());
    }
}

TEST(loads_from_files_in_memory) {
    for (const support::Setup& setup : support::setups()) {
        if (!setup.memory) continue;
        const support::FaultScope scope;
        const support::TempDir dir(setup);
        std::mt19937_64 random(6);
        const Bytes content = support::random_bytes(random, 100001);
        support::write_file(dir / "f", content);
        support::write_file(dir / "empty", {});
        DescriptorFile file = DescriptorFile::open(dir / "f", true);
        CHECK(std::ranges::equal(file.memory(), content));
        CHECK(DescriptorFile::open(dir / "empty", true).memory().empty());
        constexpr std::uint64_t kOffset = 4999;
        Bytes to(content.size() - kOffset);
        IoRequest request{.kind = IoKind::read,
                          .file = &file,
                          .buffer = to.data(),
                          .length = to.size(),
                          .required = to.size(),
                          .offset = kOffset,
                          .token = 3};
        for (const auto* action : {"none", "short", "eintr"}) {
            std::ranges::fill(to, std::byte{0});
            if (action != std::string_view("none")) fault::arm("read", action, 0, 1, 0);
            const IoCompletion completion = request.file->transfer(request);
            fault::clear();
            CHECK(completion.ok());
            CHECK_EQ(completion.transferred, to.size());
            CHECK(std::ranges::equal(to, std::span(content).subspan(kOffset)));
            file.let_go(kOffset, to.size());  // later loads still work
        }
        // A file with a hole is not mapped, and reading fills no hole.
        support::write_file(dir / "sparse", content);
        std::filesystem::resize_file(dir / "sparse", 2 * content.size());
        DescriptorFile sparse = DescriptorFile::open(dir / "sparse", true);
        CHECK(sparse.memory().empty());
        request.file = &sparse;
        request.offset = content.size();
        CHECK(request.file->transfer(request).ok());
        CHECK(std::ranges::all_of(to, [](std::byte byte) { return byte == std::byte{0}; }));
        CHECK(DescriptorFile::open(dir / "sparse", true).memory().empty());
        request.file = &file;
        request.offset = kOffset;

        fault::arm("read", "fail", EIO, 1, 1);
        CHECK_EQ(request.file->transfer(request).error_number, EIO);
        ++request.offset;
        const IoCompletion beyond = request.file->transfer(request);
        CHECK(beyond.end_of_file);
        CHECK_EQ(beyond.transferred, to.size() - 1);
    }
}

TEST(choice_of_backend) {
    const support::FaultScope scope;
    fault::arm("uring_setup", "fail", EPERM, 1, 0);
    CHECK_EQ(make_backend("auto", 4, 1)->name(), "pwrite");
    CHECK_THROWS(ErrorCode::io, make_backend("io_uring", 4, 1));
    CHECK_THROWS(ErrorCode::invalid, make_backend("posix", 4, 1));
    CHECK_THROWS(ErrorCode::invalid, make_backend("auto", 0, 1));
    CHECK_THROWS(ErrorCode::invalid, make_backend("auto", 4, 0));
}

TEST(a_kernel_without_the_opcodes_has_no_ring_for_us) {
    const support::FaultScope scope;
    fault::arm("uring_probe", "fail", EINVAL, 1, 0);  // as Linux 5.1 to 5.5 answer
    CHECK_EQ(make_backend("auto", 4, 1)->name(), "pwrite");
    CHECK_THROWS(ErrorCode::io, make_backend("io_uring", 4, 1));
}

CHECK_MAIN()
