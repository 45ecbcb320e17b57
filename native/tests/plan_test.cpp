#include "datastates/plan.hpp"

#include <array>
#include <cstring>
#include <functional>

#include "check.hpp"
#include "datastates/base/error.hpp"

using namespace datastates;

namespace {

using U64 = std::vector<std::uint64_t>;
using I32 = std::vector<std::int32_t>;

/// Two sources in two extents, with literal bytes between. Tests spoil one field each.
struct WriteArrays {
    U64 source_nbytes{4096, 8};
    std::uint64_t chunk_bytes = 1000;
    std::vector<std::byte> literal = std::vector<std::byte>(64);
    U64 extent_offset{0, 4096};
    U64 extent_length{4096, 72};
    U64 extent_piece{0, 1, 3};
    I32 piece_source{0, -1, 1};
    U64 piece_source_offset{0, 0, 0};
    U64 piece_extent_offset{0, 0, 64};
    U64 piece_length{4096, 64, 8};
    U64 patch_extent{1};
    U64 patch_offset{4};
    I32 patch_source{0};
    U64 patch_after{0};
    std::vector<std::uint8_t> eager{1, 0};
    I32 runs_source{0, 0, 1};
    U64 runs_offset{0, 64, 0};
    U64 runs_length{128, 64, 8};
    U64 runs_each{64, 32, 8};
    U64 runs_after{500, 100, 0};
    U64 runs_step{500, 50, 8};
    std::vector<std::uint32_t> runs_digest{0, 1, 1};
    std::uint64_t digests = 2;

    WritePlan make() const {
        return WritePlan({.source_nbytes = source_nbytes,
                          .chunk_bytes = chunk_bytes,
                          .literal = literal,
                          .extent_offset = extent_offset,
                          .extent_length = extent_length,
                          .extent_piece = extent_piece,
                          .piece_source = piece_source,
                          .piece_source_offset = piece_source_offset,
                          .piece_extent_offset = piece_extent_offset,
                          .piece_length = piece_length,
                          .patch_extent = patch_extent,
                          .patch_offset = patch_offset,
                          .patch_source = patch_source,
                          .patch_after = patch_after,
                          .eager = eager,
                          .runs_source = runs_source,
                          .runs = {.digests = digests,
                                   .offset = runs_offset,
                                   .length = runs_length,
                                   .run_length = runs_each,
                                   .after = runs_after,
                                   .step = runs_step,
                                   .digest = runs_digest}});
    }
};

struct ReadArrays {
    U64 dest_nbytes{100};
    U64 extent_offset{5, 60};
    U64 extent_length{50, 50};
    std::vector<std::uint8_t> extent_shared{0, 1};
    U64 extent_span{0, 1, 3};
    U64 span_offset{0, 0, 40};
    U64 span_length{50, 30, 10};
    U64 span_count{1, 1, 1};
    U64 span_step{50, 30, 10};
    U64 extent_piece{0, 1, 2};
    I32 piece_dest{0, 0};
    U64 piece_dest_offset{0, 50};
    U64 piece_extent_offset{0, 0};
    U64 piece_length{50, 30};
    U64 piece_count{1, 1};
    U64 piece_extent_step{50, 30};
    U64 piece_dest_step{50, 30};
    U64 extent_check{0, 1, 1};
    U64 check_offset{10};
    U64 check_length{40};
    std::vector<std::uint32_t> check_crc{1};
    I32 check_record{0};

    ReadPlan make() const {
        return ReadPlan({.dest_nbytes = dest_nbytes,
                         .extent_offset = extent_offset,
                         .extent_length = extent_length,
                         .extent_shared = extent_shared,
                         .extent_span = extent_span,
                         .span_offset = span_offset,
                         .span_length = span_length,
                         .span_count = span_count,
                         .span_step = span_step,
                         .extent_piece = extent_piece,
                         .piece_dest = piece_dest,
                         .piece_dest_offset = piece_dest_offset,
                         .piece_extent_offset = piece_extent_offset,
                         .piece_length = piece_length,
                         .piece_count = piece_count,
                         .piece_extent_step = piece_extent_step,
                         .piece_dest_step = piece_dest_step,
                         .extent_check = extent_check,
                         .check_offset = check_offset,
                         .check_length = check_length,
                         .check_crc = check_crc,
                         .check_record = check_record});
    }
};

template <typename Arrays>
void refuses(const std::function<void(Arrays&)>& spoil) {
    Arrays arrays;
    spoil(arrays);
    CHECK_THROWS(ErrorCode::invalid, arrays.make());
}

constexpr std::uint64_t kHuge = ~std::uint64_t{0};

}  // namespace

TEST(takes_a_good_write_plan) {
    const WritePlan plan = WriteArrays{}.make();
    CHECK_EQ(plan.extents().size(), 2U);
    CHECK_EQ(plan.file_length(), 4168U);
    CHECK_EQ(plan.eager_extents(), 1U);
    CHECK_EQ(plan.source_extents(), 2U);
    CHECK_EQ(plan.first_chunk(1), 5U);
    CHECK_EQ(plan.first_chunk(2), 6U);
    CHECK_EQ(plan.patches(plan.extents()[0]).size(), 0U);
    CHECK_EQ(plan.patches(plan.extents()[1]).size(), 1U);
    CHECK_EQ(plan.digests(), 2U);
    CHECK_EQ(plan.digest_runs(0).size(), 2U);
    CHECK_EQ(plan.digest_runs(1).size(), 1U);
    CHECK_EQ(plan.digest_runs(0)[1].after, 100U);
}

TEST(fingerprints_begin_on_a_word_of_the_file) {
    WriteArrays arrays;
    CHECK_EQ(arrays.make().first_word(1), 0U);
    arrays.piece_length[1] = arrays.piece_extent_offset[2] = 61;
    arrays.extent_length[1] = 69;
    CHECK_EQ(arrays.make().first_word(0), 0U);
    CHECK_EQ(arrays.make().first_word(1), 3U);
    arrays.source_nbytes[1] = arrays.piece_length[2] = 2;  // it ends before the word
    arrays.extent_length[1] = 63;
    arrays.digests = 0;
    arrays.runs_source = {};
    arrays.runs_offset = arrays.runs_length = arrays.runs_each = arrays.runs_after = {};
    arrays.runs_step = {};
    arrays.runs_digest = {};
    CHECK_EQ(arrays.make().first_word(1), 2U);
}

TEST(refuses_to_cut_a_word_of_the_file) {
    WriteArrays arrays;
    arrays.extent_piece = {0, 1, 4};
    arrays.piece_source = {0, -1, 1, 1};
    arrays.piece_source_offset = {0, 0, 0, 4};
    arrays.piece_extent_offset = {0, 0, 64, 68};
    arrays.piece_length = {4096, 64, 4, 4};
    CHECK_THROWS(ErrorCode::invalid, arrays.make());
    arrays.piece_extent_offset = {0, 0, 60, 64};  // the cut lies on a word of the file
    arrays.piece_length[1] = 60;
    arrays.extent_length[1] = 68;
    CHECK_EQ(arrays.make().first_word(1), 4U);
}

TEST(a_write_plan_may_leave_gaps) {
    CHECK(!WriteArrays().make().has_gaps());
    WriteArrays arrays;
    arrays.extent_offset = {8192, 16384};
    const WritePlan plan = arrays.make();
    CHECK(plan.has_gaps());
    CHECK_EQ(plan.stretches().size(), 2U);
    CHECK_EQ(plan.stretches()[1].offset, 16384U);
    CHECK_EQ(plan.stretches()[1].length, 72U);
    CHECK_EQ(plan.bytes(), 4168U);
    CHECK_EQ(plan.file_length(), 16456U);
    arrays.extent_offset = {4096, 8192};
    CHECK_EQ(arrays.make().stretches().size(), 1U);
    CHECK(arrays.make().has_gaps());
}

TEST(parts_and_a_constant_make_up_a_checksum) {
    const auto bytes = std::as_bytes(std::span("three parts of one record"));
    const auto part = [&](std::size_t from, std::size_t n) {
        return crc32(0, bytes.subspan(from, n));
    };
    const std::uint32_t known = Crc32Shift(bytes.size() - 12).shift(part(6, 6));
    std::vector<std::byte> extent(8);
    std::memcpy(extent.data() + 4, &known, sizeof known);
    WritePlan::Patch{.offset = 4, .source = 0, .after = bytes.size() - 6}.apply(part(0, 6), extent);
    WritePlan::Patch{.offset = 4, .source = 1, .after = 0}.apply(part(12, bytes.size() - 12),
                                                                 extent);
    std::uint32_t found = 0;
    std::memcpy(&found, extent.data() + 4, sizeof found);
    CHECK_EQ(found, crc32(0, bytes));
}

TEST(takes_an_empty_write_plan) {
    const WritePlan plan({.chunk_bytes = 1, .extent_piece = std::array<std::uint64_t, 1>{0}});
    CHECK_EQ(plan.file_length(), 0U);
}

TEST(refuses_bad_write_plans) {
    using A = WriteArrays;
    refuses<A>([](A& a) { a.chunk_bytes = 0; });
    refuses<A>([](A& a) { a.eager.pop_back(); });
    refuses<A>([](A& a) { a.source_nbytes[0] = kHuge; });
    refuses<A>([](A& a) { a.source_nbytes[0] = 4104; });  // not wholly in the file
    refuses<A>([](A& a) { a.extent_length.pop_back(); });
    refuses<A>([](A& a) { a.extent_offset[1] = 4100; });  // off a page
    refuses<A>([](A& a) { a.extent_offset[0] = 4096; });  // not in order
    refuses<A>([](A& a) { a.extent_length[0] = 4000; });  // off a page
    refuses<A>([](A& a) { a.extent_length[1] = 0; });
    refuses<A>([](A& a) { a.extent_length[1] = kHuge; });
    refuses<A>([](A& a) { a.extent_piece = {0, 1}; });
    refuses<A>([](A& a) { a.extent_piece = {0, 2, 1}; });
    refuses<A>([](A& a) { a.extent_piece = {0, 1, 4}; });
    refuses<A>([](A& a) { a.extent_piece = {1, 1, 3}; });
    refuses<A>([](A& a) { a.piece_source[0] = 2; });
    refuses<A>([](A& a) { a.piece_source[0] = -2; });
    refuses<A>([](A& a) { a.piece_source_offset[0] = 8; });
    refuses<A>([](A& a) { a.piece_source_offset[0] = kHuge; });
    refuses<A>([](A& a) { a.piece_source_offset[1] = 1; });   // outside the literal
    refuses<A>([](A& a) { a.piece_extent_offset[2] = 63; });  // overlap
    refuses<A>([](A& a) { a.piece_length[1] = 63; });
    refuses<A>([](A& a) { a.piece_length[0] = 0; });
    refuses<A>([](A& a) { a.piece_length[0] = kHuge; });
    refuses<A>([](A& a) { a.piece_length.pop_back(); });
    refuses<A>([](A& a) { a.patch_extent[0] = 2; });
    refuses<A>([](A& a) { a.patch_offset[0] = 69; });
    refuses<A>([](A& a) { a.patch_offset[0] = kHuge; });
    refuses<A>([](A& a) { a.patch_source[0] = 2; });
    refuses<A>([](A& a) { a.patch_source[0] = -1; });
    refuses<A>([](A& a) { a.patch_extent[0] = 0, a.patch_source[0] = 1; });  // before its source
    refuses<A>([](A& a) { a.eager = {0, 1}; });                              // eager after lazy
    refuses<A>([](A& a) { a.patch_source.clear(); });
    refuses<A>([](A& a) { a.runs_source.pop_back(); });
    refuses<A>([](A& a) { a.runs_source[2] = 2; });
    refuses<A>([](A& a) { a.runs_source[0] = -1; });
    refuses<A>([](A& a) { a.runs_source = {1, 0, 0}; });
    refuses<A>([](A& a) { a.runs_offset[2] = 1; });   // outside its source
    refuses<A>([](A& a) { a.runs_offset[0] = 65; });  // not in order
    refuses<A>([](A& a) { a.runs_each[0] = 0; });
    refuses<A>([](A& a) { a.runs_digest[0] = 2; });
    refuses<A>([](A& a) { a.digests = 4; });
    refuses<A>([](A& a) { a.runs_step.clear(); });
}

TEST(refuses_bad_read_plans) {
    using A = ReadArrays;
    refuses<A>([](A& a) { a.extent_shared = {0}; });
    refuses<A>([](A& a) { a.extent_span = {0, 1}; });
    refuses<A>([](A& a) { a.extent_span = {0, 0, 3}; });
    refuses<A>([](A& a) { a.extent_span = {0, 2, 3}; });
    refuses<A>([](A& a) { a.span_length.pop_back(); });
    refuses<A>([](A& a) { a.span_offset[0] = 1; });   // does not begin with its extent
    refuses<A>([](A& a) { a.span_length[0] = 49; });  // does not end with it
    refuses<A>([](A& a) { a.span_offset[2] = 29; });  // overlaps the one before it
    refuses<A>([](A& a) { a.span_offset[2] = 41; });
    refuses<A>([](A& a) { a.span_length[1] = 0; });
    refuses<A>([](A& a) { a.span_length[1] = kHuge; });
    refuses<A>([](A& a) { a.piece_length[1] = 31; });  // reaches into a gap
    refuses<A>([](A& a) { a.piece_extent_offset[1] = 35; });
    CHECK_EQ(ReadArrays{}.make().bytes(), 90U);
    refuses<A>([](A& a) { a.extent_offset[1] = 4; });
    refuses<A>([](A& a) { a.extent_offset[1] = kHuge; });
    refuses<A>([](A& a) { a.extent_length[0] = 0; });
    refuses<A>([](A& a) { a.extent_length[0] = kHuge; });
    refuses<A>([](A& a) { a.extent_length[0] = 49; });
    refuses<A>([](A& a) { a.extent_piece = {0, 3, 2}; });
    refuses<A>([](A& a) { a.piece_dest[0] = 1; });
    refuses<A>([](A& a) { a.piece_dest[0] = -1; });
    refuses<A>([](A& a) { a.piece_dest_offset[1] = 71; });
    refuses<A>([](A& a) { a.piece_extent_offset[1] = kHuge; });
    refuses<A>([](A& a) { a.piece_length[1] = kHuge; });
    refuses<A>([](A& a) { a.extent_check = {0, 0, 2}; });
    refuses<A>([](A& a) { a.check_length[0] = 41; });
    A two;
    two.extent_piece = {0, 2, 2};
    two.piece_extent_offset = {10, 20};
    two.extent_check = {0, 2, 2};
    two.check_offset = {5, 10};
    two.check_length = {20, 5};
    two.check_crc = {1, 2};
    two.check_record = {0, 0};
    two.piece_length = {30, 30};
    two.make();
    const auto descending = [&](U64 A::* column) {
        A a = two;
        std::swap((a.*column)[0], (a.*column)[1]);
        CHECK_THROWS(ErrorCode::invalid, a.make());
    };
    descending(&A::piece_extent_offset);
    descending(&A::check_offset);
    refuses<A>([](A& a) { a.check_crc.clear(); });
    refuses<A>([](A& a) { a.check_record.clear(); });
}

/// An extent of five rows of 6 bytes, 10 apart, and a stretch of 20 bytes behind them.
TEST(refuses_bad_rows) {
    using A = ReadArrays;
    A rows;
    rows.extent_offset = {5};
    rows.extent_length = {70};
    rows.extent_shared = {0};
    rows.extent_span = {0, 2};
    rows.span_offset = {0, 50};
    rows.span_length = {6, 20};
    rows.span_count = {5, 1};
    rows.span_step = {10, 0};
    rows.extent_piece = {0, 1};
    rows.piece_dest = {0};
    rows.piece_dest_offset = {0};
    rows.piece_extent_offset = {1};
    rows.piece_length = {5};
    rows.piece_count = {7};
    rows.piece_extent_step = {10};
    rows.piece_dest_step = {5};
    rows.extent_check = {0, 1};
    rows.check_offset = {50};
    rows.check_length = {20};
    CHECK_EQ(rows.make().bytes(), 50U);
    const auto refuse = [&](const std::function<void(A&)>& spoil) {
        A a = rows;
        spoil(a);
        CHECK_THROWS(ErrorCode::invalid, a.make());
    };
    refuse([](A& a) { a.span_count[0] = 0; });
    refuse([](A& a) { a.span_count[0] = 6; });  // overlaps the next
    refuse([](A& a) { a.span_count[0] = kHuge; });
    refuse([](A& a) { a.span_count[1] = 2; });
    refuse([](A& a) { a.span_step[0] = 5; });  // overlaps itself
    refuse([](A& a) { a.span_step[0] = 0; });
    refuse([](A& a) { a.span_step[0] = kHuge; });
    refuse([](A& a) { a.span_step.pop_back(); });
    refuse([](A& a) { a.span_count.pop_back(); });
    refuse([](A& a) { a.piece_length[0] = 6; });  // reaches into the gaps
    refuse([](A& a) { a.piece_extent_offset[0] = 2; });
    refuse([](A& a) { a.piece_extent_step[0] = 11; });
    refuse([](A& a) { a.piece_count[0] = 8; });
    refuse([](A& a) { a.piece_count[0] = 0; });
    refuse([](A& a) { a.piece_count[0] = kHuge; });
    refuse([](A& a) { a.piece_dest_step[0] = 4; });
    refuse([](A& a) { a.piece_dest_step[0] = 16; });  // outside its destination
    refuse([](A& a) { a.piece_dest_step[0] = kHuge; });
    refuse([](A& a) { a.piece_count.clear(); });
    refuse([](A& a) { a.piece_extent_step.clear(); });
    refuse([](A& a) { a.piece_dest_step.clear(); });
    refuse([](A& a) { a.check_offset[0] = 40; });
    A other = rows;  // every other row
    other.piece_extent_step = {20};
    other.piece_count = {4};
    other.make();
    other.piece_extent_step = {25};
    CHECK_THROWS(ErrorCode::invalid, other.make());
}

TEST(refuses_bad_buffers) {
    const U64 nbytes{0, 8};
    const Buffers good{.address = {0, 8}, .device = {-1, 0}, .stream = {0, 0}, .witness = {1, 1}};
    good.validate(nbytes, true);
    const auto refuse = [&](const std::function<void(Buffers&)>& spoil) {
        Buffers bad = good;
        spoil(bad);
        CHECK_THROWS(ErrorCode::invalid, bad.validate(nbytes, true));
    };
    refuse([](Buffers& b) { b.address[1] = 0; });
    refuse([](Buffers& b) { b.address[1] = kHuge; });
    refuse([](Buffers& b) { b.device[1] = -2; });
    refuse([](Buffers& b) { b.stream.pop_back(); });
    refuse([](Buffers& b) { b.witness.pop_back(); });
}

CHECK_MAIN()
