#include "datastates/read/exchange.hpp"

#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <span>
#include <thread>
#include <utility>
#include <vector>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/executor.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;

namespace {

constexpr std::chrono::milliseconds kLong{600'000};

std::array<FileDescriptor, 2> connection() {
    std::array<int, 2> ends{};
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends.data()) != 0) {
        throw std::runtime_error("socketpair failed");
    }
    return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

std::uint64_t address(const Bytes& memory, std::size_t at) {
    return reinterpret_cast<std::uint64_t>(memory.data() + at);
}

Rows rows_in(const Bytes& memory, std::size_t at, std::uint64_t length, std::uint64_t count,
             std::uint64_t step) {
    return {
        .first = address(memory, at), .device = -1, .length = length, .count = count, .step = step};
}

std::vector<Peer> one_peer(FileDescriptor socket, std::vector<Rows> rows) {
    std::vector<Peer> peers;
    peers.push_back({.socket = std::move(socket), .rows = std::move(rows)});
    return peers;
}

/// An exchange with one peer that it receives nothing from.
Exchange sender(FileDescriptor socket) { return {one_peer(std::move(socket), {}), kLong}; }

void send(Exchange& exchange, std::uint64_t offset, std::span<std::byte> bytes) {
    const iovec part{.iov_base = bytes.data(), .iov_len = bytes.size()};
    exchange.send(0, offset, {&part, 1});
}

std::span<std::byte> part(Bytes& bytes, std::size_t at, std::size_t length) {
    return std::span(bytes).subspan(at, length);
}

}  // namespace

TEST(a_parcel_fills_its_rows) {
    std::mt19937_64 random(1);
    for (int round = 0; round < 50; ++round) {
        Bytes memory(100'000), expected;
        std::vector<Rows> rows;
        std::uint64_t nbytes = 0;
        for (std::size_t at = 0; rows.size() < 5;) {
            const std::uint64_t length = 1 + (random() % 500), count = 1 + (random() % 20);
            const std::uint64_t step = length + (random() % 300);
            rows.push_back({.first = address(memory, at),
                            .device = -1,
                            .length = length,
                            .count = count,
                            .step = step});
            at += ((count - 1) * step) + length + (random() % 100);
            nbytes += length * count;
        }
        Bytes parcel = support::random_bytes(random, nbytes);
        expected = memory;
        std::uint64_t taken = 0;
        for (const Rows& r : rows) {
            for (std::uint64_t i = 0; i < r.count; ++i, taken += r.length) {
                std::memcpy(expected.data() + (r.first - address(memory, 0)) + (i * r.step),
                            parcel.data() + taken, r.length);
            }
        }
        std::vector<std::size_t> cuts = {0, nbytes};
        for (int i = 0; i < 30; ++i) cuts.push_back(random() % nbytes);
        std::ranges::sort(cuts);
        cuts.erase(std::unique(cuts.begin(), cuts.end()), cuts.end());
        std::vector<std::size_t> order(cuts.size() - 1);
        for (std::size_t i = 0; i < order.size(); ++i) order[i] = i;
        std::ranges::shuffle(order, random);
        auto [here, there] = connection();
        Exchange receiver(one_peer(std::move(here), rows), kLong);
        Exchange from = sender(std::move(there));
        for (const std::size_t i : order) {
            CHECK(!receiver.arrived()[0]);
            send(from, cuts[i], part(parcel, cuts[i], cuts[i + 1] - cuts[i]));
        }
        CHECK(receiver.wait());
        CHECK(receiver.arrived()[0]);
        CHECK(memory == expected);
    }
}

TEST(a_parcel_of_nothing_has_arrived) {
    auto [here, there] = connection();
    Exchange receiver = sender(std::move(here));
    CHECK(receiver.wait());
    CHECK(receiver.arrived()[0]);
}

TEST(what_arrived_before_the_end_of_a_peer_is_taken) {
    auto [here, there] = connection();
    Bytes memory(1000), parcel(1000, std::byte{7});
    {
        Exchange from = sender(std::move(there));
        send(from, 0, part(parcel, 0, 1000));
    }
    Exchange receiver(one_peer(std::move(here), {rows_in(memory, 0, 1000, 1, 1000)}), kLong);
    CHECK(receiver.wait());
    CHECK(receiver.arrived()[0]);
    CHECK(memory == parcel);
}

TEST(a_peer_that_ends_early_is_lost_and_others_are_not) {
    auto [here, there] = connection();
    auto [other_here, other_there] = connection();
    Bytes memory(2000), parcel(1000, std::byte{7});
    std::vector<Peer> peers = one_peer(std::move(here), {rows_in(memory, 0, 1000, 1, 1000)});
    peers.push_back(
        {.socket = std::move(other_here), .rows = {rows_in(memory, 1000, 1000, 1, 1000)}});
    Exchange receiver(std::move(peers), kLong);
    {
        Exchange from = sender(std::move(there));
        send(from, 0, part(parcel, 0, 999));
    }
    CHECK(!receiver.wait(Clock::now()));
    Exchange other = sender(std::move(other_there));
    send(other, 0, part(parcel, 0, 1000));
    CHECK(receiver.wait());
    CHECK(!receiver.arrived()[0]);
    CHECK(receiver.arrived()[1]);
    // Nobody takes it any more.
    send(receiver, 0, part(parcel, 0, 1000));
}

TEST(bytes_that_a_parcel_does_not_have_are_not_put_anywhere) {
    const Bytes untouched(1000);
    Bytes bytes(2000, std::byte{7});
    const std::vector<std::pair<std::uint64_t, std::size_t>> wrong = {
        {1000, 1}, {0, 1001}, {~std::uint64_t{0}, 1}, {500, 600}, {0, 0}};
    for (const auto& [offset, length] : wrong) {
        auto [here, there] = connection();
        Bytes memory(1000);
        Exchange receiver(one_peer(std::move(here), {rows_in(memory, 0, 100, 10, 100)}), kLong);
        Exchange from = sender(std::move(there));
        send(from, offset, part(bytes, 0, length));
        CHECK(receiver.wait());
        CHECK(!receiver.arrived()[0]);
        CHECK(memory == untouched);
    }
}

TEST(a_peer_that_takes_or_sends_nothing_is_given_up) {
    auto [here, there] = connection();
    Bytes memory(1000), bytes(Exchange::kMessage, std::byte{7});
    Exchange stuck(one_peer(std::move(here), {rows_in(memory, 0, 1000, 1, 1000)}),
                   std::chrono::milliseconds(20));
    for (int i = 0; i < 1000; ++i) send(stuck, 0, bytes);  // far more than a socket takes
    CHECK(stuck.wait());
    CHECK(!stuck.arrived()[0]);
}

TEST(silence_counts_only_while_somebody_waits) {
    auto [here, there] = connection();
    Bytes memory(1000), parcel(1000, std::byte{7});
    Exchange receiver(one_peer(std::move(here), {rows_in(memory, 0, 1000, 1, 1000)}),
                      std::chrono::milliseconds(1));
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    Exchange from = sender(std::move(there));
    send(from, 0, part(parcel, 0, 1000));
    CHECK(receiver.wait());
    CHECK(receiver.arrived()[0]);
}

TEST(closing_wakes_who_sends_and_who_waits) {
    auto [here, there] = connection();
    Bytes memory(1000), bytes(Exchange::kMessage, std::byte{7});
    Exchange exchange(one_peer(std::move(here), {rows_in(memory, 0, 1000, 1, 1000)}), kLong);
    const std::jthread sends([&] {
        for (int i = 0; i < 1000; ++i) send(exchange, 0, bytes);
    });
    const std::jthread waits([&] { exchange.wait(); });
    exchange.close();
}

TEST(rows_without_memory_are_refused) {
    for (const Rows& rows : std::vector<Rows>{{0, -1, 1, 1, 1},
                                              {8, -1, 4, 2, 3},
                                              {8, -1, 4, 0, 4},
                                              {8, -1, 0, 2, 4},
                                              {8, 0, 4, 1, 4}}) {
        auto [here, there] = connection();
        CHECK_THROWS(ErrorCode::invalid, Exchange(one_peer(std::move(here), {rows}), kLong));
    }
}

namespace {

constexpr std::uint64_t kRow = 3000, kRows = 700, kCheck = 250'000;
constexpr std::uint64_t kHalf = kRow * kRows / 2;

/// One of two ranks that want the left and the right half of each row of a file. Each reads the
/// rows of one half of the file.
struct Rank {
    std::size_t number;
    Bytes memory = Bytes(kHalf);
    std::shared_ptr<Exchange> exchange{};

    void connect(FileDescriptor socket) {
        const Rows rows{.first = address(memory, (1 - number) * kHalf / 2),
                        .device = -1,
                        .length = kRow / 2,
                        .count = kRows / 2,
                        .step = kRow / 2};
        exchange = std::make_shared<Exchange>(one_peer(std::move(socket), {rows}), kLong);
    }
    std::unique_ptr<ReadJob> read(Executor& executor, const std::string& path, const Bytes& file) {
        const std::uint64_t begin = number * kHalf;
        std::vector<std::uint64_t> check_at, check_nbytes;
        std::vector<std::uint32_t> crc;
        for (std::uint64_t at = 0; at < kHalf; at += kCheck) {
            check_at.push_back(at);
            check_nbytes.push_back(std::min(kCheck, kHalf - at));
            crc.push_back(crc32(0, std::span(file).subspan(begin + at, check_nbytes.back())));
        }
        const std::vector<std::uint64_t> nbytes = {kHalf / 2, kHalf / 2}, zero = {0, 0},
                                         one = {0, 1}, two = {0, 2}, checks = {0, crc.size()},
                                         at = {0, kRow / 2}, length = {kRow / 2, kRow / 2},
                                         count = {kRows / 2, kRows / 2}, step = {kRow, kRow},
                                         single = {1};
        const std::vector<std::int32_t> record(crc.size());
        // The left half of a row is rank 0's.
        const std::vector<std::int32_t> dest = {number == 0 ? 0 : 1, number == 0 ? 1 : 0};
        const std::vector<std::uint8_t> shared = {0};
        const auto plan = std::make_shared<ReadPlan>(ReadPlanArrays{.dest_nbytes = nbytes,
                                                                    .extent_offset = {&begin, 1},
                                                                    .extent_length = {&kHalf, 1},
                                                                    .extent_shared = shared,
                                                                    .extent_span = one,
                                                                    .span_offset = {zero.data(), 1},
                                                                    .span_length = {&kHalf, 1},
                                                                    .span_count = single,
                                                                    .span_step = {&kHalf, 1},
                                                                    .extent_piece = two,
                                                                    .piece_dest = dest,
                                                                    .piece_dest_offset = zero,
                                                                    .piece_extent_offset = at,
                                                                    .piece_length = length,
                                                                    .piece_count = count,
                                                                    .piece_extent_step = step,
                                                                    .piece_dest_step = length,
                                                                    .extent_check = checks,
                                                                    .check_offset = check_at,
                                                                    .check_length = check_nbytes,
                                                                    .check_crc = crc,
                                                                    .check_record = record});
        Buffers buffers{.address = {address(memory, number * kHalf / 2), 0},
                        .device = {-1, -2},
                        .stream = {0, 0},
                        .witness = {}};
        return executor.submit_read(path, plan, std::move(buffers), nullptr, exchange);
    }
    bool has_its_columns(const Bytes& file) {
        for (std::uint64_t i = 0; i < kRows; ++i) {
            const auto row = std::span(file).subspan((i * kRow) + (number * kRow / 2), kRow / 2);
            if (!std::ranges::equal(row, std::span(memory).subspan(i * kRow / 2, kRow / 2)))
                return false;
        }
        return true;
    }
};

}  // namespace

TEST(two_ranks_read_half_of_a_file_each_and_get_their_columns) {
    std::mt19937_64 random(2);
    const Bytes file = support::random_bytes(random, kRow * kRows);
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        support::write_file(dir / "f", file);
        for (const bool cold : {false, true}) {
            if (cold) support::drop_cache(dir / "f");
            const auto executor = support::make_executor(setup, 4, std::size_t{2} << 20);
            auto [left, right] = connection();
            Rank first{.number = 0}, second{.number = 1};
            first.connect(std::move(left));
            second.connect(std::move(right));
            const auto one = first.read(*executor, dir / "f", file);
            const auto other = second.read(*executor, dir / "f", file);
            CHECK(one->wait());
            CHECK(other->wait());
            for (Rank* rank : {&first, &second}) {
                CHECK(rank->exchange->wait());
                CHECK(rank->exchange->arrived()[0]);
                CHECK(rank->has_its_columns(file));
            }
        }
    }
}

TEST(what_is_damaged_is_not_sent) {
    std::mt19937_64 random(3);
    const Bytes file = support::random_bytes(random, kRow * kRows);
    const support::TempDir dir;
    Bytes damaged = file;
    damaged[kCheck + 5] ^= std::byte{1};
    support::write_file(dir / "f", damaged);
    const auto executor =
        support::make_executor({.backend = "pwrite", .direct = false}, 4, std::size_t{2} << 20);
    auto [left, right] = connection();
    Rank first{.number = 0}, second{.number = 1};
    first.connect(std::move(left));
    second.connect(std::move(right));
    auto one = first.read(*executor, dir / "f", file);
    const auto other = second.read(*executor, dir / "f", file);
    CHECK_THROWS(ErrorCode::corrupt, one->wait());
    CHECK(other->wait());
    first.exchange->close();
    CHECK(second.exchange->wait());
    CHECK(!second.exchange->arrived()[0]);
    const auto rest = std::span(second.memory).first(kHalf / 2).subspan(kCheck / 2);
    CHECK(std::ranges::all_of(rest, [](std::byte b) { return b == std::byte{0}; }));
}

TEST(a_job_that_is_dropped_does_not_wait_for_a_peer_that_takes_nothing) {
    std::mt19937_64 random(4);
    const Bytes file = support::random_bytes(random, kRow * kRows);
    const support::TempDir dir;
    support::write_file(dir / "f", file);
    const auto executor =
        support::make_executor({.backend = "pwrite", .direct = false}, 4, std::size_t{2} << 20);
    auto [left, right] = connection();
    Rank first{.number = 0};
    first.connect(std::move(left));
    static_cast<void>(first.read(*executor, dir / "f", file));
}

TEST(a_forked_child_drops_an_exchange_and_the_parent_goes_on) {
    auto executor =
        support::make_executor({.backend = "pwrite", .direct = false}, 4, std::size_t{2} << 20);
    auto [here, there] = connection();
    Bytes memory(1000), parcel(1000, std::byte{7});
    auto exchange = executor->begin_exchange(
        one_peer(std::move(here), {rows_in(memory, 0, 1000, 1, 1000)}), {}, kLong);
    Exchange from = sender(std::move(there));
    const pid_t child = ::fork();
    if (child == 0) {
        ::alarm(60);
        executor->abandon();
        exchange.reset();
        ::_exit(0);
    }
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    send(from, 0, part(parcel, 0, 1000));
    CHECK(exchange->wait());
    CHECK(exchange->arrived()[0]);
    CHECK(memory == parcel);
}

TEST(a_peer_that_no_exchange_has_is_refused) {
    const support::TempDir dir;
    const Bytes file(kRow * kRows);
    support::write_file(dir / "f", file);
    const auto executor =
        support::make_executor({.backend = "pwrite", .direct = false}, 4, std::size_t{2} << 20);
    Rank alone{.number = 0};
    CHECK_THROWS(ErrorCode::invalid, alone.read(*executor, dir / "f", file));
}

CHECK_MAIN()
