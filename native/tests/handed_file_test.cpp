#include "datastates/io/handed_file.hpp"

#include <cerrno>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <set>
#include <stdexcept>
#include <thread>

#include "check.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;
using support::ReadCase;
using support::WriteCase;

namespace {

constexpr std::size_t kBlock = 256 * 1024;
constexpr std::uint64_t kExtent = 100000;
constexpr std::size_t kAtOnce = 32;

/// The bytes of a file, what is asked for, and a hook before each answer.
struct Held {
    Bytes bytes;
    std::size_t best_piece = SIZE_MAX;
    std::function<void(Held&, std::uint64_t offset)> before;
    std::function<void(std::span<std::byte> memory, std::uint64_t offset)> after{};
    std::mutex mutex;
    std::condition_variable changed;
    std::size_t asked = 0;
    std::size_t answered = 0;
    std::size_t longest = 0;
    std::set<const std::byte*> into{};
    bool given_up = false;

    void wait_for(const std::function<bool()>& done) {
        std::unique_lock lock(mutex);
        changed.wait(lock, done);
    }
};

class TestFile final : public HandedFile {
  public:
    explicit TestFile(Held& held) : HandedFile("mem://f", held.best_piece), held_(held) {}
    void give_up(std::size_t order) override {
        HandedFile::give_up(order);
        const std::scoped_lock lock(held_.mutex);
        held_.given_up = true;
        held_.changed.notify_all();
    }

  private:
    void read(std::span<std::byte> memory, std::uint64_t offset) override {
        {
            const std::scoped_lock lock(held_.mutex);
            ++held_.asked;
            held_.longest = std::max(held_.longest, memory.size());
            held_.into.insert(memory.data());
            held_.changed.notify_all();
        }
        if (held_.before) held_.before(held_, offset);
        if (offset + memory.size() > held_.bytes.size()) throw std::runtime_error("it ends");
        std::copy_n(held_.bytes.begin() + static_cast<std::ptrdiff_t>(offset), memory.size(),
                    memory.begin());
        const std::scoped_lock lock(held_.mutex);
        if (held_.after) held_.after(memory, offset);
        ++held_.answered;
        held_.changed.notify_all();
    }

    Held& held_;
};

struct Case {
    explicit Case(std::size_t nbytes, std::uint64_t extent = kExtent, std::size_t shift = 0)
        : written(WriteCase::make(
              {support::random_bytes(random, nbytes), {}, support::random_bytes(random, 7)},
              {0, 0, 1}, kBlock, 4096, random)),
          read(ReadCase::make(written, extent, shift)) {
        held.bytes = written.expected;
    }

    std::unique_ptr<ReadJob> submit() {
        return executor->submit_read(std::make_unique<TestFile>(held), read.plan, read.buffers());
    }
    bool matches() {
        for (std::size_t i = 0; i < written.sources.size(); ++i) {
            const Bytes& source = written.sources[i];
            if (!std::equal(source.begin(), source.end(), read.dests[i].data())) return false;
        }
        return true;
    }

    std::mt19937_64 random{1};
    std::shared_ptr<Executor> executor =
        support::make_executor({.backend = "pwrite", .direct = true}, 4, kBlock);
    WriteCase written;
    ReadCase read;
    Held held;
};

Error failure_of(const ReadJob& job) {
    try {
        job.wait();
    } catch (const Error& error) {
        return error;
    }
    throw std::runtime_error("the read has not failed");
}

}  // namespace

TEST(bytes_come_in_pieces_straight_into_their_destination) {
    for (const std::size_t piece :
         {std::size_t{4097}, std::size_t{64} << 10, std::size_t{8} << 20}) {
        for (const std::size_t shift : {0, 3}) {
            Case a(1000001, kExtent, shift);
            a.held.best_piece = piece;
            const auto job = a.submit();
            CHECK(job->wait());
            CHECK(a.matches());
            CHECK_EQ(a.held.longest, std::min<std::size_t>(piece, kExtent));
            CHECK_EQ(a.held.into.count(a.read.dests[0].data()), 1U);
            const ReadStats stats = job->stats();
            CHECK_EQ(stats.bytes_read, a.read.plan->bytes());
            CHECK_EQ(stats.in_place_bytes, stats.bytes_needed);
            CHECK_EQ(stats.cached_bytes, 0U);
            CHECK(!stats.direct);
            CHECK_EQ(job->backend_name(), "handed");
        }
    }
}

/// They are asked for once more, and the second answer counts.
TEST(bytes_that_changed_on_their_way) {
    for (const std::size_t piece : {std::size_t{1000}, std::size_t{8} << 20}) {
        for (const int times : {1, 2}) {
            Case a(300000);
            a.held.best_piece = piece;
            int left = times;
            a.held.after = [&](std::span<std::byte> memory, std::uint64_t offset) {
                const std::uint64_t wrong = 150'000;
                if (offset > wrong || wrong >= offset + memory.size() || left-- <= 0) return;
                memory[wrong - offset] ^= std::byte{1};
            };
            const auto job = a.submit();
            if (times == 1) {
                CHECK(job->wait());
                CHECK(a.matches());
            } else {
                CHECK(failure_of(*job).code() == ErrorCode::corrupt);
            }
            CHECK(left <= 0);
        }
    }
}

/// It is read whole, with its gaps, and passes through a block.
TEST(a_sparse_extent_is_one_piece) {
    Case a(300000);
    const std::vector<std::uint64_t> nbytes{2000}, offset{1000}, length{61000}, index{0, 2},
        one{0, 0}, spans{0, 60000}, each{1000, 1000}, into{0, 1000};
    const std::vector<std::int32_t> dest{0, 0};
    const auto plan = support::plan_of_single({.dest_nbytes = nbytes,
                                               .extent_offset = offset,
                                               .extent_length = length,
                                               .extent_span = index,
                                               .span_offset = spans,
                                               .span_length = each,
                                               .extent_piece = index,
                                               .piece_dest = dest,
                                               .piece_dest_offset = into,
                                               .piece_extent_offset = spans,
                                               .piece_length = each,
                                               .extent_check = one});
    Bytes to(2000);
    const Buffers buffers{.address = {reinterpret_cast<std::uint64_t>(to.data())},
                          .device = {-1},
                          .stream = {0},
                          .witness = {}};
    CHECK(a.executor->submit_read(std::make_unique<TestFile>(a.held), plan, buffers)->wait());
    CHECK_EQ(a.held.asked, 1U);
    CHECK_EQ(a.held.longest, 61000U);
    CHECK(std::equal(to.begin(), to.begin() + 1000, a.held.bytes.begin() + 1000));
    CHECK(std::equal(to.begin() + 1000, to.end(), a.held.bytes.begin() + 61000));
}

TEST(one_slow_answer_holds_up_no_other) {
    Case a(1000000);
    a.held.best_piece = 10000;
    const std::size_t pieces = a.read.plan->bytes() / 10000;
    a.held.before = [&](Held& held, std::uint64_t offset) {
        if (offset != a.written.source_at[0] + kExtent) return;
        held.wait_for(
            [&] { return held.answered == pieces; });  // all but this one and the short one
    };
    CHECK(a.submit()->wait());
    CHECK(a.matches());
}

TEST(a_slow_answer_holds_up_no_other_file) {
    Case a(1000000);
    Case b(500000);
    const support::TempDir dir;
    support::write_file(dir / "f", a.written.expected);
    bool done = false;
    a.held.before = [&](Held& held, std::uint64_t) { held.wait_for([&] { return done; }); };
    const auto job = a.submit();
    a.held.wait_for([&] { return a.held.asked > 0; });
    ReadCase local = ReadCase::make(a.written, kExtent, 1);
    CHECK(a.executor->submit_read(dir / "f", local.plan, local.buffers())->wait());
    CHECK(std::equal(a.written.sources[0].begin(), a.written.sources[0].end(),
                     local.dests[0].data()));
    const auto other =
        a.executor->submit_read(std::make_unique<TestFile>(b.held), b.read.plan, b.read.buffers());
    CHECK(other->wait());
    CHECK(b.matches());
    {
        const std::scoped_lock lock(a.held.mutex);
        CHECK_EQ(a.held.answered, 0U);
        done = true;
        a.held.changed.notify_all();
    }
    CHECK(job->wait());
    CHECK(a.matches());
}

TEST(errors_keep_what_they_tell_and_the_lowest_extent_counts) {
    Case a(1000000);
    const std::uint64_t first = a.written.source_at[0] + (2 * kExtent);
    a.held.before = [&](Held& held, std::uint64_t offset) {
        if (offset > first) throw std::runtime_error("later");
        if (offset < first) return;
        held.wait_for([&] { return held.given_up; });  // a later one has failed
        throw Error::io(EACCES, "read", "mem://f");
    };
    const Error error = failure_of(*a.submit());
    CHECK(error.code() == ErrorCode::io);
    CHECK_EQ(error.error_number(), EACCES);
    CHECK_EQ(error.path(), "mem://f");
    a.held.before = nullptr;
    a.held.bytes.resize(500000);
    CHECK_EQ(std::string(failure_of(*a.submit()).what()), "it ends");
    CHECK_THROWS(ErrorCode::invalid, [&] {
        a.held.best_piece = 0;
        static_cast<void>(a.submit());
    }());
}

TEST(damage_names_the_file) {
    Case a(1000000);
    a.held.bytes[a.written.source_at[0] + 500000] ^= std::byte{1};
    const Error error = failure_of(*a.submit());
    CHECK(error.code() == ErrorCode::corrupt);
    CHECK_EQ(error.path(), "mem://f");
    CHECK_EQ(error.record(), 0);
}

/// Only calls under way are waited for, where the job is stopped and where it fails.
TEST(nothing_more_is_asked_for_once_nobody_wants_it) {
    for (const bool fails : {false, true}) {
        Case a(1000000);
        a.held.best_piece = 1000;
        const std::uint64_t first =
            a.written.order[0] == 2 ? a.written.source_at[2] : a.written.source_at[0];
        a.held.before = [&](Held& held, std::uint64_t offset) {
            held.wait_for([&] { return held.asked >= kAtOnce; });
            if (fails && offset == first) throw Error::io(EIO, "read", "mem://f");
            held.wait_for([&] { return held.given_up; });
        };
        auto job = a.submit();
        a.held.wait_for([&] { return a.held.asked >= kAtOnce; });
        if (fails) {
            CHECK_EQ(failure_of(*job).error_number(), EIO);
        } else {
            job.reset();
        }
        CHECK(a.held.asked <= kAtOnce + 1);
    }
}

CHECK_MAIN()
