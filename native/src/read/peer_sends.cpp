#include "datastates/read/peer_sends.hpp"

#include <algorithm>
#include <span>

namespace datastates {

PeerSends::PeerSends(const ReadState& job, const ReadPlan::Extent& extent)
    : job_(job),
      pieces_(job.exchange() == nullptr ? std::span<const ReadPlan::Piece>()
                                        : job.plan().pieces(extent)) {}

void PeerSends::advance(std::uint64_t end, const StepMemory& data) {
    pieces_.advance(end, [&](const ReadPlan::Piece& part) {
        const auto peer = job_.buffers().peer(part.dest);
        if (!peer) return;
        for (std::uint64_t i = 0; i < part.count; ++i) {
            const std::uint64_t offset = part.dest_offset + (i * part.dest_step);
            std::byte* const bytes = data.at(part.extent_offset + (i * part.extent_step));
            for (std::uint64_t at = 0; at < part.length; at += Exchange::kMessage) {
                add(*peer, offset + at, bytes + at,
                    std::min<std::size_t>(part.length - at, Exchange::kMessage));
            }
        }
    });
    flush();
}

void PeerSends::add(std::size_t peer, std::uint64_t offset, std::byte* bytes, std::size_t length) {
    const bool follows = peer == peer_ && offset == begin_ + bytes_;
    const bool fits = count_ < parts_.size() && bytes_ + length <= Exchange::kMessage;
    if (!follows || !fits) flush();
    if (count_ == 0) {
        peer_ = peer;
        begin_ = offset;
    }
    parts_[count_++] = {.iov_base = bytes, .iov_len = length};
    bytes_ += length;
}

void PeerSends::flush() {
    if (count_ > 0) job_.exchange()->send(peer_, begin_, std::span(parts_).first(count_));
    count_ = 0;
    bytes_ = 0;
}

}  // namespace datastates
