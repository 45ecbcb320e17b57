#include "datastates/read/exchange.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/base/thread.hpp"
#include "datastates/plan_checks.hpp"

namespace datastates {
namespace {

// Messages to take from one peer before the others have their turn.
constexpr int kTurn = 16;

timeval duration(std::chrono::milliseconds time) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(time);
    const std::chrono::microseconds rest = time - seconds;
    return {.tv_sec = seconds.count(), .tv_usec = rest.count()};
}

}  // namespace

Exchange::Exchange(std::vector<Peer> peers, std::chrono::milliseconds patience)
    : patience_(patience), links_(peers.size()), buffer_(kMessage) {
    const timeval limit = duration(patience);
    for (std::size_t i = 0; i < peers.size(); ++i) {
        Link& link = links_[i];
        link.socket = std::move(peers[i].socket);
        link.rows = std::move(peers[i].rows);
        for (const Rows& rows : link.rows) {
            require(rows.first != nullptr, "rows have no memory", i);
            require(spaced_within(0, rows.length, rows.count, rows.step, kLimit) &&
                        rows.length <= kLimit / rows.count,
                    "rows are out of range", i);
            link.begin.push_back(link.left);
            link.left += rows.length * rows.count;
            require(link.left < kLimit, "a parcel is too long", i);
        }
        link.begin.push_back(link.left);
        // A peer that takes nothing would otherwise hold up a worker for ever.
        if (::setsockopt(link.socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof(limit)) != 0) {
            throw Error::io(errno, "setsockopt", "");
        }
    }
    thread_ = start_thread("ds-exchange", [this] { receive(); });
}

Exchange::~Exchange() { close(); }

void Exchange::close() {
    for (Link& link : links_) lose(link);
}

/// Wakes whoever sends to the peer or waits for it.
void Exchange::lose(Link& link) {
    link.lost.store(true);
    // Fails only for a connection that the peer has closed.
    static_cast<void>(::shutdown(link.socket.get(), SHUT_RDWR));
}

void Exchange::send(std::size_t peer, std::uint64_t offset, std::span<const iovec> pieces) {
    Link& link = links_[peer];
    if (link.lost.load()) return;
    std::array<iovec, kPieces + 1> parts{};
    parts.front() = {.iov_base = &offset, .iov_len = sizeof(offset)};
    std::ranges::copy(pieces, parts.begin() + 1);
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = pieces.size() + 1;
    ssize_t sent = 0;
    do {
        sent = ::sendmsg(link.socket.get(), &message, MSG_NOSIGNAL);
    } while (sent < 0 && errno == EINTR);
    if (sent < 0) lose(link);
}

bool Exchange::wait(Deadline deadline) const {
    std::unique_lock lock(mutex_);
    return wait_until(changed_, lock, deadline, [&] { return ended_; });
}

std::vector<bool> Exchange::arrived() const {
    const std::scoped_lock lock(mutex_);
    std::vector<bool> result;
    result.reserve(links_.size());
    for (const Link& link : links_) result.push_back(ended_ && link.left == 0);
    return result;
}

/// The thread's work.
void Exchange::receive() {
    while (std::ranges::any_of(links_, open)) wait_for_messages();
    const std::scoped_lock lock(mutex_);
    ended_ = true;
    changed_.notify_all();
}

/// Waits for messages, and takes some of each peer that has sent any.
void Exchange::wait_for_messages() {
    std::vector<pollfd> polled;
    std::vector<Link*> waiting;
    for (Link& link : links_) {
        if (!open(link)) continue;
        polled.push_back({.fd = link.socket.get(), .events = POLLIN, .revents = 0});
        waiting.push_back(&link);
    }
    const int ready = ::poll(polled.data(), polled.size(), static_cast<int>(patience_.count()));
    if (ready < 0 && errno == EINTR) return;
    for (std::size_t i = 0; i < polled.size(); ++i) {
        if (ready <= 0) {
            lose(*waiting[i]);
        } else if (polled[i].revents != 0) {
            take_messages(*waiting[i]);
        }
    }
}

void Exchange::take_messages(Link& link) {
    for (int i = 0; i < kTurn && open(link); ++i) {
        if (!take_message(link, buffer_)) return;
    }
}

/// Takes a message that is there; false if there is none.
bool Exchange::take_message(Link& link, std::span<std::byte> buffer) {
    std::uint64_t offset = 0;
    std::array<iovec, 2> parts{{{.iov_base = &offset, .iov_len = sizeof(offset)},
                                {.iov_base = buffer.data(), .iov_len = buffer.size()}}};
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = parts.size();
    const ssize_t got = ::recvmsg(link.socket.get(), &message, MSG_DONTWAIT);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return false;
    const auto bytes = static_cast<std::size_t>(std::max<ssize_t>(got, 0));
    const bool whole = bytes > sizeof(offset) && (message.msg_flags & MSG_TRUNC) == 0;
    if (!whole || !put(link, offset, buffer.first(bytes - sizeof(offset)))) lose(link);
    return true;
}

/// Puts bytes of a parcel in place; false for bytes that it does not have.
bool Exchange::put(Link& link, std::uint64_t offset, std::span<const std::byte> bytes) {
    if (bytes.size() > link.left || !within(offset, bytes.size(), link.begin.back())) return false;
    link.left -= bytes.size();
    auto at = static_cast<std::size_t>(std::ranges::upper_bound(link.begin, offset) -
                                       link.begin.begin() - 1);
    while (!bytes.empty()) {
        const Rows& rows = link.rows[at];
        const std::uint64_t number = (offset - link.begin[at]) / rows.length;
        if (number == rows.count) {
            ++at;
            continue;
        }
        const std::uint64_t within_row = (offset - link.begin[at]) % rows.length;
        const auto length = std::min<std::uint64_t>(rows.length - within_row, bytes.size());
        std::memcpy(rows.first + number * rows.step + within_row, bytes.data(), length);
        offset += length;
        bytes = bytes.subspan(length);
    }
    return true;
}

}  // namespace datastates
