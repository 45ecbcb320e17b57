#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "datastates/base/timeline.hpp"
#include "datastates/checksum/checksum.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/write/write_state.hpp"

namespace datastates {

/// Tracks of the capture stage: the capture thread, a caller of submit_write, from the third on one
/// for each device, and from the last on one for each worker.
inline constexpr std::uint32_t kThreadTrack = 0;
inline constexpr std::uint32_t kCallerTrack = 1;
inline constexpr std::uint32_t kDeviceTracks = 2;
inline constexpr std::uint32_t kWorkerTracks = 1U << 16;

/// Which of an extent's sources.
enum class Pick : std::uint8_t { all, eager, lazy };

/// An extent on its way from the capture to the file. One thread's at a time.
struct CapturedExtent {
    CapturedExtent(std::shared_ptr<WriteState> state, std::size_t extent_index, Block cache_block)
        : job(std::move(state)), index(extent_index), block(std::move(cache_block)) {}
    /// The block goes back when no device writes into it any more.
    ~CapturedExtent() {
        for (const auto& event : events) {
            if (!event->synchronize()) block.lose();
        }
    }
    CapturedExtent(const CapturedExtent&) = delete;
    CapturedExtent& operator=(const CapturedExtent&) = delete;
    CapturedExtent(CapturedExtent&&) = delete;
    CapturedExtent& operator=(CapturedExtent&&) = delete;

    const WritePlan::Extent& extent() const { return job->plan().extents()[index]; }
    bool has_host_sources() const;

    /// Copies host sources and literal bytes into the block, and digests them on the way. Ends
    /// early when the job is stopped.
    void copy_host(Pick pick);
    /// Digests what has come from devices, and returns how many bytes that were.
    std::uint64_t digest_devices();
    /// Tells the job the checksums of what was digested.
    void tell_checksums() const;
    /// Tells the timeline that its capture, begun at `begin`, ends now.
    void note_capture(std::uint32_t track) const {
        job->timeline().add(Stage::capture, track, begin, extent().length);
    }

    std::shared_ptr<WriteState> job;
    std::size_t index;
    Block block;
    Clock::time_point begin = Clock::now();      // of its capture
    std::vector<std::shared_ptr<Event>> events;  // of the device copies under way
    /// A worker is to copy its host sources.
    bool host_later = false;
    /// It is a worker's.
    std::atomic<bool> working = false;

  private:
    struct SourceFragment {
        std::size_t source;
        CrcFragment fragment;
    };
    template <typename Bring>
    void digest(const WritePlan::Piece& piece, Bring&& bring);

    std::vector<SourceFragment> fragments_;  // of each source in order
};

}  // namespace datastates
