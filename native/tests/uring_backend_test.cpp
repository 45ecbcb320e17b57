#include "datastates/io/uring_backend.hpp"

#include <cerrno>

#include "check.hpp"
#include "support.hpp"

/// The kernel refuses to take entries or to wait for completions. A hang shows as a timeout.
using namespace datastates;
using support::Bytes;

namespace {

constexpr std::size_t kRequests = 20;
constexpr std::size_t kLength = 65536;
constexpr unsigned kDepth = 4;

bool no_ring() {
    try {
        const UringBackend backend(kDepth);
        return false;
    } catch (const Error& error) {
        std::cout << "SKIPPED: no io_uring here: " << error.what() << "\n" << std::flush;
        return true;
    }
}

/// Writes and then reads more than the ring takes at a time, with the refusals that `arm` sets.
template <typename Arm>
void check_moves_all(Arm&& arm) {
    for (const bool direct : {true, false}) {
        const support::TempDir dir;
        const support::FaultScope scope;
        std::mt19937_64 random(1);
        const Bytes data = support::random_bytes(random, kRequests * kLength);
        support::Aligned from(data.size());
        std::memcpy(from.data(), data.data(), data.size());
        support::Aligned to(data.size());
        for (const IoKind kind : {IoKind::write, IoKind::read}) {
            const bool writes = kind == IoKind::write;
            DescriptorFile file = writes ? DescriptorFile::create(dir / "f", direct)
                                         : DescriptorFile::open(dir / "f", direct);
            UringBackend backend(kDepth);
            arm();
            for (std::size_t i = 0; i < kRequests; ++i) {
                backend.submit({.kind = kind,
                                .file = &file,
                                .buffer = (writes ? from : to).data() + (i * kLength),
                                .length = kLength,
                                .required = kLength,
                                .offset = i * kLength,
                                .token = i});
            }
            std::size_t done = 0;
            while (backend.in_flight() > 0) {
                for (const IoCompletion& completion : backend.reap(true)) {
                    CHECK(completion.ok());
                    CHECK_EQ(completion.transferred, kLength);
                    ++done;
                }
            }
            CHECK_EQ(done, kRequests);
            fault::clear();
        }
        CHECK(support::read_file(dir / "f") == data);
        CHECK(std::equal(data.begin(), data.end(), to.data()));
    }
}

}  // namespace

TEST(with_nothing_to_wait_for_a_refusal_is_not_waited_out) {
    if (no_ring()) return;
    for (const int error : {EAGAIN, EBUSY, EINTR}) {
        for (const std::uint64_t count : {1, 3, 50}) {
            check_moves_all([&] { fault::arm("uring_enter", "fail", error, 1, count); });
        }
    }
}

TEST(a_ring_refused_for_good_moves_all_the_same) {
    if (no_ring()) return;
    for (const int error : {EAGAIN, EPERM, EBADF}) {
        for (const std::uint64_t nth : {1, 2, 3, 6, 20}) {
            check_moves_all([&] { fault::arm("uring_enter", "fail", error, nth, 0); });
        }
    }
}

TEST(a_ring_refused_from_the_start_is_none) {
    const support::FaultScope scope;
    fault::arm("uring_enter", "fail", EPERM, 1, 0);
    CHECK_EQ(make_backend("auto", kDepth, 1)->name(), "pwrite");
    CHECK_THROWS(ErrorCode::io, make_backend("io_uring", kDepth, 1));
}

TEST(a_ring_that_was_refused_is_used_again_and_woken) {
    if (no_ring()) return;
    const support::TempDir dir;
    const support::FaultScope scope;
    DescriptorFile file = DescriptorFile::create(dir / "f", true);
    support::Aligned memory(kLength);
    UringBackend backend(kDepth);
    for (int round = 0; round < 50; ++round) {
        fault::arm("uring_enter", "fail", round % 2 == 0 ? EAGAIN : EPERM, 1, 2);
        const std::jthread waker([&] { backend.wake(); });
        backend.submit({.kind = IoKind::write,
                        .file = &file,
                        .buffer = memory.data(),
                        .length = kLength,
                        .required = kLength,
                        .offset = 0,
                        .token = 0});
        while (backend.in_flight() > 0) {
            for (const IoCompletion& completion : backend.reap(true)) CHECK(completion.ok());
        }
    }
}

TEST(destruction_of_a_ring_refused_for_good_ends) {
    if (no_ring()) return;
    const support::TempDir dir;
    DescriptorFile file = DescriptorFile::create(dir / "f", true);
    support::Aligned memory(kLength);
    for (const std::uint64_t nth : {1, 3}) {
        const support::FaultScope scope;
        UringBackend backend(kDepth);
        fault::arm("uring_enter", "fail", EPERM, nth, 0);
        for (std::uint64_t i = 0; i < kRequests; ++i) {
            backend.submit({.kind = IoKind::write,
                            .file = &file,
                            .buffer = memory.data(),
                            .length = kLength,
                            .required = kLength,
                            .offset = i * kLength,
                            .token = i});
        }
    }
}

CHECK_MAIN()
