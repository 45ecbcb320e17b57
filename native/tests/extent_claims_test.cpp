#include "datastates/write/extent_claims.hpp"

#include <atomic>
#include <chrono>
#include <random>
#include <thread>
#include <vector>

#include "check.hpp"

using namespace datastates;

namespace {

/// A stand-in for an image. Nobody dereferences it.
std::shared_ptr<DeviceImage> token(const std::shared_ptr<int>& value) {
    return {value, reinterpret_cast<DeviceImage*>(value.get())};
}

}  // namespace

TEST(gates_come_from_behind_and_capture_from_the_front) {
    const auto value = std::make_shared<int>(0);
    ExtentClaims claims({false, true, true, false, true});
    CHECK(!claims.capture(0));
    CHECK_EQ(claims.claim_last().value(), 4U);
    claims.evacuated(4, token(value));
    CHECK_EQ(claims.claim_last().value(), 2U);
    claims.evacuated(2, token(value));
    CHECK(!claims.capture(1));
    CHECK(!claims.claim_last());
    CHECK(claims.capture(2) != nullptr);
    CHECK(!claims.capture(3));
    CHECK(claims.capture(4) != nullptr);
    CHECK(claims.was_evacuated(2) && claims.was_evacuated(4));
    CHECK(!claims.was_evacuated(1) && !claims.was_evacuated(3));
    CHECK(!claims.claim_last());
    CHECK_EQ(value.use_count(), 1);
}

TEST(nothing_to_claim) {
    ExtentClaims none(std::vector<bool>{});
    CHECK(!none.claim_last());
    ExtentClaims kept({false, false});
    CHECK(!kept.claim_last());
    CHECK(!kept.capture(0));
}

TEST(given_up_extents_can_be_claimed_again) {
    ExtentClaims claims({true, true, true});
    CHECK_EQ(claims.claim_last().value(), 2U);
    CHECK_EQ(claims.claim_last().value(), 1U);
    claims.give_up(2);
    CHECK_EQ(claims.claim_last().value(), 2U);
    claims.give_up(1);
    claims.give_up(2);
    CHECK(!claims.capture(0));
    CHECK(!claims.capture(1));
    CHECK_EQ(claims.claim_last().value(), 2U);
    claims.give_up(2);
    CHECK(!claims.capture(2));
    CHECK(!claims.claim_last());
}

TEST(capture_waits_for_a_gate_at_its_extent) {
    for (const bool gives_up : {false, true}) {
        const auto value = std::make_shared<int>(0);
        ExtentClaims claims({true});
        CHECK_EQ(claims.claim_last().value(), 0U);
        std::atomic<int> got = -1;
        std::jthread capture([&] { got = claims.capture(0) ? 1 : 0; });
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        CHECK_EQ(got.load(), -1);
        if (gives_up) {
            claims.give_up(0);
        } else {
            claims.evacuated(0, token(value));
        }
        capture.join();
        CHECK_EQ(got.load(), gives_up ? 0 : 1);
    }
}

TEST(close_waits_and_lets_go) {
    const auto value = std::make_shared<int>(0);
    ExtentClaims claims({true, true, true});
    CHECK_EQ(claims.claim_last().value(), 2U);
    claims.evacuated(2, token(value));
    CHECK_EQ(claims.claim_last().value(), 1U);
    std::atomic<bool> closed = false;
    std::jthread closer([&] {
        claims.close();
        closed = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!closed);
    CHECK(!claims.claim_last());
    claims.evacuated(1, token(value));
    closer.join();
    CHECK_EQ(value.use_count(), 1);
    CHECK(!claims.claim_last());
}

TEST(every_extent_has_one_owner) {
    std::mt19937_64 random(1);
    for (int round = 0; round < 200; ++round) {
        const std::size_t count = 1 + (random() % 60);
        std::vector<bool> evacuable(count);
        for (std::size_t i = 0; i < count; ++i) evacuable[i] = random() % 4 != 0;
        ExtentClaims claims(evacuable);
        const auto value = std::make_shared<int>(0);
        std::vector<std::atomic<int>> evacuations(count);
        std::vector<std::atomic<int>> reads(count);
        const auto gate = [&](std::uint64_t seed) {
            std::mt19937_64 choice(seed);
            while (const auto extent = claims.claim_last()) {
                CHECK(evacuable[*extent]);
                if (choice() % 8 == 0) {
                    claims.give_up(*extent);
                    return;
                }
                ++evacuations[*extent];
                claims.evacuated(*extent, token(value));
            }
        };
        {
            std::jthread first(gate, random());
            std::jthread second(gate, random());
            for (std::size_t i = 0; i < count; ++i) {
                const auto image = claims.capture(i);
                CHECK_EQ(image != nullptr, claims.was_evacuated(i));
                if (!image) ++reads[i];
            }
        }
        for (std::size_t i = 0; i < count; ++i) CHECK_EQ(evacuations[i] + reads[i], 1);
        CHECK_EQ(value.use_count(), 1);
    }
}

CHECK_MAIN()
