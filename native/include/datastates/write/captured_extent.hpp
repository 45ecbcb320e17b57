#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "datastates/base/timeline.hpp"
#include "datastates/base/unmovable.hpp"
#include "datastates/checksum/checksum.hpp"
#include "datastates/memory/copy_engine.hpp"
#include "datastates/memory/host_cache.hpp"
#include "datastates/write/write_state.hpp"

namespace datastates {

/// Timeline tracks of the capture stage: one for the capture thread, one for the caller of
/// submit_write, then one for each device, and from kWorkerTracks on one for each worker.
inline constexpr std::uint32_t kThreadTrack = 0;
inline constexpr std::uint32_t kCallerTrack = 1;
inline constexpr std::uint32_t kDeviceTracks = 2;
inline constexpr std::uint32_t kWorkerTracks = 1U << 16;

/// Selects some of an extent's sources.
enum class Pick : std::uint8_t { all, eager, lazy };

/// An extent with its block, from its capture until it is written. The capture thread or the caller
/// of submit_write fills it and hands it to the writer. It belongs to one thread at a time.
struct CapturedExtent : Unmovable {
    CapturedExtent(std::shared_ptr<WriteState> state, std::size_t extent_index, Block cache_block)
        : job(std::move(state)), index(extent_index), block(std::move(cache_block)) {}
    /// Waits until no device writes into the block, then gives it back. Where the driver refuses to
    /// wait, the block is lost.
    ~CapturedExtent() {
        for (const auto& event : events) {
            if (!event->synchronize()) block.lose();
        }
    }

    const WritePlan::Extent& extent() const { return job->plan().extents()[index]; }
    bool has_host_sources() const;

    /// Copies host sources and literal bytes into the block; computes the checksums, digests and
    /// fingerprints of the sources meanwhile. Returns early when the job is stopped.
    void copy_host(Pick pick);
    /// Computes checksums and digests of the bytes that came from devices. Returns their number.
    /// Returns early when the job is stopped.
    std::uint64_t digest_devices();
    /// Adds the computed checksums to the job's sources. Called by the writer, in file order.
    void tell_checksums() const;
    /// Adds the capture to the timeline, from `begin` to now.
    void note_capture(std::uint32_t track) const {
        job->timeline().add(Stage::capture, track, begin, extent().length);
    }

    std::shared_ptr<WriteState> job;
    std::size_t index;
    Block block;
    Clock::time_point begin = Clock::now();      // when its capture began
    std::vector<std::shared_ptr<Event>> events;  // behind its device copies
    /// A worker copies its host sources after hand_over.
    bool host_later = false;
    /// A worker has it now.
    std::atomic<bool> working = false;

  private:
    struct SourceFragment {
        std::size_t source;
        CrcFragment fragment;
    };
    template <typename Bring>
    void digest(const WritePlan::Piece& piece, Bring&& bring);

    std::vector<SourceFragment> fragments_;  // each source's in order
};

/// Gives an extent's block back, and tells its job that the extent is written or dropped.
void retire(std::unique_ptr<CapturedExtent> extent);

}  // namespace datastates
