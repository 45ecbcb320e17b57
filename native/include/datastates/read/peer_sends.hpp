#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>

#include "datastates/base/unmovable.hpp"
#include "datastates/plan.hpp"
#include "datastates/read/exchange.hpp"
#include "datastates/read/extent_steps.hpp"
#include "datastates/read/read_state.hpp"

namespace datastates {

/// Sends an extent's pieces for peers, step by step. Belongs to one thread.
class PeerSends : Unmovable {
  public:
    PeerSends(const ReadState& job, const ReadPlan::Extent& extent);

    /// Sends the bytes between the last end and a new one, an offset in the extent. Returns when
    /// the kernel has a copy of them.
    void advance(std::uint64_t end, const StepMemory& data);

  private:
    void add(std::size_t peer, std::uint64_t offset, std::byte* bytes, std::size_t length);
    void flush();

    const ReadState& job_;
    PieceSteps pieces_;
    // The message that is being put together.
    std::array<iovec, Exchange::kPieces> parts_{};
    std::size_t count_ = 0;
    std::size_t bytes_ = 0;
    std::size_t peer_ = 0;
    std::uint64_t begin_ = 0;
};

}  // namespace datastates
