#include "datastates/read/exchange.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <iterator>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/base/thread.hpp"
#include "datastates/plan_checks.hpp"
#include "datastates/read/extent_steps.hpp"

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

Exchange::Exchange(std::vector<Peer> peers, std::chrono::milliseconds patience,
                   std::unique_ptr<Staging> staging)
    : patience_(patience),
      links_(peers.size()),
      staging_(std::move(staging)),
      buffer_(staging_ ? 0 : kMessage) {
    const timeval limit = duration(patience);
    for (std::size_t i = 0; i < peers.size(); ++i) {
        Link& link = links_[i];
        link.socket = std::move(peers[i].socket);
        link.rows = std::move(peers[i].rows);
        for (const Rows& rows : link.rows) {
            require(rows.first != 0 && rows.length > 0, "rows have no memory", i);
            require(rows.device == -1 || (rows.device >= 0 && staging_ != nullptr),
                    "a device is out of range", i);
            require(spaced_within(0, rows.length, rows.count, rows.step, kLimit) &&
                        rows.length <= kLimit / rows.count,
                    "rows are out of range", i);
            link.pieces.push_back({.dest = 0,
                                   .dest_offset = 0,
                                   .extent_offset = link.nbytes,
                                   .length = rows.length,
                                   .count = rows.count,
                                   .extent_step = rows.length,
                                   .dest_step = rows.step});
            link.nbytes += rows.length * rows.count;
            require(link.nbytes < kLimit, "a parcel is too long", i);
        }
        link.left = link.nbytes;
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
    if (!waits_since_) waits_since_ = Clock::now();
    if (!wait_until(changed_, lock, deadline, [&] { return ended_; })) return false;
    if (error_) throw Error(*error_);
    return true;
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
    std::optional<Error> error;
    try {
        while (std::ranges::any_of(links_, open)) wait_for_messages();
        if (staging_) staging_->drain();
    } catch (...) {
        error = Error::current();
        close();
    }
    staging_.reset();  // waits for its copies, and gives its block back
    const std::scoped_lock lock(mutex_);
    error_ = std::move(error);
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
        if (ready < 0 || (ready == 0 && has_waited())) {
            lose(*waiting[i]);
        } else if (polled[i].revents != 0) {
            for (int n = 0; n < kTurn && open(*waiting[i]) && take_message(*waiting[i]); ++n) {
            }
        }
    }
}

/// Whether somebody has waited for as long as the patience. Before, this rank and its peers may be
/// busy with other files.
bool Exchange::has_waited() const {
    const std::scoped_lock lock(mutex_);
    return waits_since_ && Clock::now() - *waits_since_ >= patience_;
}

/// Takes a message that is there; false if there is none.
bool Exchange::take_message(Link& link) {
    const std::span<std::byte> buffer = staging_ ? staging_->part() : std::span(buffer_);
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
    if (staging_) staging_->next();
    return true;
}

/// Puts bytes of a parcel in place; false for bytes that it does not have.
bool Exchange::put(Link& link, std::uint64_t offset, std::span<const std::byte> bytes) {
    if (bytes.size() > link.left || !within(offset, bytes.size(), link.nbytes)) return false;
    link.left -= bytes.size();
    const std::uint64_t end = offset + bytes.size();
    const auto after =
        std::ranges::upper_bound(link.pieces, offset, {}, &ReadPlan::Piece::extent_offset);
    for (auto piece = std::prev(after); piece != link.pieces.end() && piece->extent_offset < end;
         ++piece) {
        const Rows& rows = link.rows[static_cast<std::size_t>(piece - link.pieces.begin())];
        take_parts(*piece, offset, end, [&](const ReadPlan::Piece& part) {
            copy(rows, part, bytes.data() + (part.extent_offset - offset));
        });
    }
    return true;
}

/// Copies a part of what rows hold, which begins at `from`, to them.
void Exchange::copy(const Rows& rows, const ReadPlan::Piece& part, const std::byte* from) {
    if (rows.device < 0) {
        copy_part(part, from, reinterpret_cast<std::byte*>(rows.first) + part.dest_offset);
        return;
    }
    staging_->copy(rows.device, {.device = rows.first + part.dest_offset,
                                 .device_step = part.dest_step,
                                 .host = from,
                                 .host_step = part.extent_step,
                                 .length = part.length,
                                 .count = part.count});
}

}  // namespace datastates
