#include "datastates/base/timeline.hpp"

#include <thread>

#include "check.hpp"

using namespace datastates;

TEST(keeps_spans_in_their_order) {
    Timeline timeline;
    CHECK(timeline.spans().empty());
    const Clock::time_point zero;
    const Span first{.stage = Stage::write,
                     .track = 3,
                     .begin = zero + std::chrono::seconds(10),
                     .end = zero + std::chrono::seconds(14),
                     .bytes = 5};
    timeline.add(first);
    timeline.add(Stage::sync, 0, zero, 0);
    const auto spans = timeline.spans();
    CHECK_EQ(spans.size(), 2U);
    CHECK(spans[0].stage == Stage::write && spans[0].track == 3U && spans[0].bytes == 5U);
    CHECK(spans[0].begin == first.begin && spans[0].end == first.end);
    CHECK(spans[1].stage == Stage::sync && spans[1].end > zero);
}

TEST(keeps_what_fits_and_counts_the_rest) {
    Timeline timeline(3);
    for (int i = 0; i < 5; ++i) timeline.add(Stage::read, 0, Clock::now(), 1);
    CHECK_EQ(timeline.spans().size(), 3U);
    CHECK_EQ(timeline.dropped(), 2U);
}

TEST(takes_spans_from_many_threads) {
    Timeline timeline;
    {
        std::vector<std::jthread> threads;
        for (std::uint32_t t = 0; t < 4; ++t) {
            threads.emplace_back([&timeline, t] {
                for (int i = 0; i < 1000; ++i) timeline.add(Stage::verify, t, Clock::now(), 1);
            });
        }
    }
    CHECK_EQ(timeline.spans().size(), 4000U);
}

TEST(stages_have_names) {
    CHECK_EQ(to_string(Stage::submit), "submit");
    CHECK_EQ(to_string(Stage::copy), "copy");
}

TEST(tracks_are_the_lowest_free_ones) {
    Tracks tracks;
    CHECK_EQ(tracks.take(), 0U);
    CHECK_EQ(tracks.take(), 1U);
    CHECK_EQ(tracks.take(), 2U);
    tracks.give_back(1);
    tracks.give_back(0);
    CHECK_EQ(tracks.take(), 0U);
    CHECK_EQ(tracks.take(), 1U);
    CHECK_EQ(tracks.take(), 3U);
}

CHECK_MAIN()
