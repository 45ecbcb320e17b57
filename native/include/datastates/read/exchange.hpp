#pragma once

#include <sys/uio.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>
#include <vector>

#include "datastates/base/deadline.hpp"
#include "datastates/base/descriptor.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/unmovable.hpp"
#include "datastates/memory/staging.hpp"
#include "datastates/plan.hpp"

namespace datastates {

/// Equal stretches of memory, equally spaced.
struct Rows {
    std::uint64_t first;   // address
    std::int32_t device;   // CUDA ordinal, -1: host
    std::uint64_t length;  // of each
    std::uint64_t count;
    std::uint64_t step;  // from the begin of one to that of the next
};

/// A rank of the same host, as the caller connected it.
struct Peer {
    FileDescriptor socket;   // a Unix socket of type SOCK_SEQPACKET
    std::vector<Rows> rows;  // what the peer's parcel fills, in order
};

/// A restore's connections to its peers, the other ranks of the host. Each rank reads and verifies
/// a share of what they all want. To each peer it sends a parcel: the peer's rows in that share,
/// end to end. A message is an offset in the parcel and the bytes from there on. A thread of this
/// object puts what arrives in place.
///
/// A connection that fails is no error: its parcel then never arrives, and the caller reads it from
/// the file instead. Thread-safe.
class Exchange : Unmovable {
  public:
    /// Most bytes of a message, without its offset.
    static constexpr std::size_t kMessage = std::size_t{64} << 10;
    /// Most pieces of memory that a message's bytes come from.
    static constexpr std::size_t kPieces = 256;

    /// Begins to receive. It gives up on a peer that takes nothing for as long as `patience`, and
    /// on peers that send nothing for as long while somebody waits for them. The memory of all rows
    /// must stay alive until wait() has returned true, or the destruction. `staging`, for rows on
    /// devices, has parts of kMessage bytes; null if there are none. Throws Error "invalid" for
    /// rows without memory.
    Exchange(std::vector<Peer> peers, std::chrono::milliseconds patience,
             std::unique_ptr<Staging> staging = nullptr);
    /// Closes the connections and joins the thread.
    ~Exchange();

    std::size_t peers() const { return links_.size(); }
    /// Sends a message of at most kMessage bytes in kPieces pieces. Waits while the peer has no
    /// room for it. Does nothing for a peer that is lost.
    void send(std::size_t peer, std::uint64_t offset, std::span<const iovec> pieces);
    /// Waits until each parcel has arrived or is lost; false when the deadline passes first. Throws
    /// Error "cuda" if a copy to a device has failed.
    bool wait(Deadline deadline = {}) const;
    /// For each peer, whether its parcel has arrived.
    std::vector<bool> arrived() const;
    /// Closes the connections: what has not arrived by then is lost, here and at the peers.
    void close();

  private:
    struct Link {
        FileDescriptor socket;
        std::vector<Rows> rows;
        std::vector<ReadPlan::Piece> pieces;  // the rows, as pieces of the parcel
        std::uint64_t nbytes = 0;             // of the parcel
        std::uint64_t left = 0;               // bytes that have not arrived
        std::atomic<bool> lost = false;
    };

    void receive();
    void wait_for_messages();
    bool has_waited() const;
    bool take_message(Link& link);
    bool put(Link& link, std::uint64_t offset, std::span<const std::byte> bytes);
    void copy(const Rows& rows, const ReadPlan::Piece& part, const std::byte* from);
    static void lose(Link& link);
    static bool open(const Link& link) { return link.left > 0 && !link.lost.load(); }

    const std::chrono::milliseconds patience_;
    std::vector<Link> links_;
    std::unique_ptr<Staging> staging_;
    std::vector<std::byte> buffer_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    mutable std::optional<Clock::time_point> waits_since_;
    bool ended_ = false;
    std::optional<Error> error_;
    std::jthread thread_;  // last: joins first
};

}  // namespace datastates
