#include "datastates/reservation.hpp"

#include <atomic>
#include <cerrno>
#include <thread>
#include <vector>

#include "check.hpp"
#include "support.hpp"

using namespace datastates;

namespace {

constexpr std::uint64_t kPart = 64 << 10;
constexpr std::uint64_t kParts = 256;
constexpr std::uint64_t kLength = kParts * kPart;
constexpr std::uint64_t kStep = 10 * kPart;

struct Outcome {
    std::atomic<int> fits = 0;
    std::atomic<int> full = 0;
    std::atomic<int> wrong = 0;
};

/// Many threads, each taking the next part as the workers do.
void fill(Reservation& reservation, const File& file, Outcome& outcome) {
    std::atomic<std::uint64_t> next = 0;
    std::vector<std::jthread> threads;
    for (int i = 0; i < 12; ++i) {
        threads.emplace_back([&] {
            for (std::uint64_t part = next++; part < kParts; part = next++) {
                const std::uint64_t end = (part + 1) * kPart;
                try {
                    const bool good = reservation.ensure(file, end) && file.size() >= end;
                    ++(good ? outcome.fits : outcome.wrong);
                } catch (const Error& error) {
                    const bool good = error.error_number() == ENOSPC && error.op() == "allocate";
                    ++(good && error.path() == file.path() ? outcome.full : outcome.wrong);
                }
            }
        });
    }
}

}  // namespace

TEST(reserves_a_step_ahead) {
    const support::TempDir dir;
    const File file = File::create(dir / "f", false);
    Reservation reservation(kLength, kStep);
    CHECK(reservation.ensure(file, kPart));
    CHECK_EQ(file.size(), kPart + kStep);
    CHECK(reservation.ensure(file, kPart));  // a whole step ahead already
    CHECK_EQ(file.size(), kPart + kStep);
    CHECK(reservation.ensure(file, 2 * kPart));
    CHECK_EQ(file.size(), kPart + (2 * kStep));
    CHECK(reservation.ensure(file, kLength - 1));
    CHECK_EQ(file.size(), kLength);
    CHECK(reservation.ensure(file, kLength));
    CHECK_EQ(file.size(), kLength);
}

TEST(others_go_on_while_one_reserves) {
    const support::TempDir dir;
    const support::FaultScope scope;
    const File file = File::create(dir / "f", false);
    Reservation reservation(kLength, kStep);
    CHECK(reservation.ensure(file, kPart));
    constexpr std::chrono::milliseconds kDelay(1000);
    fault::arm("allocate", "delay", kDelay.count(), 1, 1);
    std::atomic<bool> reserved = false;
    const std::jthread slow([&] {
        reservation.ensure(file, kStep);
        reserved = true;
    });
    const auto begin = std::chrono::steady_clock::now();
    while (std::chrono::steady_clock::now() - begin < kDelay / 4) {
        CHECK(reservation.ensure(file, kPart));
    }
    CHECK(!reserved);
    CHECK(reservation.ensure(file, kPart + kStep + 1));  // waits for the one under way
    CHECK(std::chrono::steady_clock::now() - begin >= kDelay / 2);
}

TEST(many_threads) {
    const support::TempDir dir;
    const File file = File::create(dir / "f", false);
    Reservation reservation(kLength, kStep);
    Outcome outcome;
    fill(reservation, file, outcome);
    CHECK_EQ(outcome.fits.load(), static_cast<int>(kParts));
    CHECK_EQ(file.size(), kLength);
}

TEST(no_space_ahead_fails_nobody_who_fits) {
    const support::TempDir dir;
    const support::FaultScope scope;
    const File file = File::create(dir / "f", false);
    Reservation reservation(kLength, kStep);
    fault::arm("allocate", "fail", ENOSPC, 2, 1);
    CHECK(reservation.ensure(file, kPart));
    CHECK_EQ(file.size(), kPart);
    Outcome outcome;
    fill(reservation, file, outcome);
    CHECK_EQ(outcome.fits.load(), static_cast<int>(kParts));
    CHECK_EQ(file.size(), kLength);
}

TEST(all_who_do_not_fit_are_told) {
    const support::TempDir dir;
    const support::FaultScope scope;
    const File file = File::create(dir / "f", false);
    Reservation reservation(kLength, kStep);
    fault::arm("allocate", "fail", ENOSPC, 5, 0);
    Outcome outcome;
    fill(reservation, file, outcome);
    CHECK_EQ(outcome.wrong.load(), 0);
    CHECK(outcome.full > 0);
    CHECK_EQ(outcome.fits.load(), static_cast<int>(file.size() / kPart));
    CHECK_EQ(outcome.fits + outcome.full, static_cast<int>(kParts));
    fault::arm("allocate", "fail", EOPNOTSUPP, 1, 1);
    CHECK(!reservation.ensure(file, kLength));
}

CHECK_MAIN()
