#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "datastates/memory/copy_engine.hpp"
#include "datastates/plan.hpp"

namespace datastates {

/// Notices sources that change between submit and capture: it compares their fingerprints then with
/// those of the captured bytes. Owned by the WriteState. Submit sets the first fingerprints before
/// anything is captured; the other calls but `torn` are thread-safe.
class Witness {
  public:
    /// Both outlive this.
    Witness(const WritePlan& plan, const Buffers& buffers);

    void set_before(std::size_t source, std::uint64_t fingerprint) {
        before_[source] = fingerprint;
    }
    void add_before(DeviceFingerprints fingerprints, std::vector<std::size_t> sources) {
        device_before_.push_back(
            {.fingerprints = std::move(fingerprints), .sources = std::move(sources)});
    }

    /// Adds a captured piece, which begins at `data`.
    void add(const WritePlan::Piece& piece, const std::byte* data);
    /// Adds the captured pieces of an extent that came from devices. `memory` holds the extent.
    void add_devices(const WritePlan::Extent& extent, const std::byte* memory);
    /// Marks a source as torn: its owner has unmapped some of its memory.
    void lose(std::int32_t source) { lost_[static_cast<std::size_t>(source)] = true; }
    /// The sources that changed or were lost. REQUIRES: all are captured.
    std::vector<int> torn();

  private:
    struct Before {
        DeviceFingerprints fingerprints;
        std::vector<std::size_t> sources;
    };

    const WritePlan& plan_;
    const Buffers& buffers_;
    std::vector<std::uint64_t> before_;
    std::vector<Before> device_before_;  // moved to before_ once captured
    std::vector<std::atomic<std::uint64_t>> after_;
    std::vector<std::atomic<bool>> lost_;
};

}  // namespace datastates
