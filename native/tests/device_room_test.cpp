#include "check.hpp"
#include "datastates/memory/device_cache.hpp"

using namespace datastates;

namespace {
constexpr std::uint64_t kGiB = std::uint64_t{1} << 30;
}  // namespace

TEST(room_ends_at_the_limit) {
    CHECK_EQ(device_room(8 * kGiB, 0, 100 * kGiB, 140 * kGiB), 8 * kGiB);
    CHECK_EQ(device_room(8 * kGiB, 3 * kGiB, 100 * kGiB, 140 * kGiB), 5 * kGiB);
    CHECK_EQ(device_room(8 * kGiB, 8 * kGiB, 100 * kGiB, 140 * kGiB), 0U);
    CHECK_EQ(device_room(8 * kGiB, 9 * kGiB, 100 * kGiB, 140 * kGiB), 0U);
    CHECK_EQ(device_room(0, 0, 100 * kGiB, 140 * kGiB), 0U);
}

TEST(room_leaves_a_margin_free) {
    // A twentieth of a large device, 1 GiB of a small one.
    CHECK_EQ(device_room(80 * kGiB, 0, 9 * kGiB, 140 * kGiB), 2 * kGiB);
    CHECK_EQ(device_room(80 * kGiB, 0, 7 * kGiB, 140 * kGiB), 0U);
    CHECK_EQ(device_room(80 * kGiB, 0, 3 * kGiB, 8 * kGiB), 2 * kGiB);
    CHECK_EQ(device_room(80 * kGiB, 0, 1, 8 * kGiB), 0U);
    CHECK_EQ(device_room(80 * kGiB, 0, 0, 8 * kGiB), 0U);
}

CHECK_MAIN()
