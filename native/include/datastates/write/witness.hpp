#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "datastates/plan.hpp"
#include "datastates/write/device_witness.hpp"

namespace datastates {

/// Notices sources that change between submit and capture. In host memory it compares sampled
/// fingerprints at submit with those of the captured bytes, on devices whole ones of the memory
/// (see DeviceWitness). Owned by the WriteState. Submit sets the first fingerprints before anything
/// is captured; the other calls but `torn` are thread-safe.
class Witness {
  public:
    /// Both outlive this.
    Witness(const WritePlan& plan, const Buffers& buffers);

    void set_before(std::size_t source, std::uint64_t fingerprint) {
        before_[source] = fingerprint;
    }

    /// Adds a captured piece of host memory, which begins at `data`.
    void add(const WritePlan::Piece& piece, const std::byte* data);
    /// Marks a source as torn: its owner has unmapped some of its memory.
    void lose(std::int32_t source) { lost_[static_cast<std::size_t>(source)] = true; }
    DeviceWitness& devices() { return devices_; }
    /// The sources that changed or were lost. REQUIRES: all are captured, and the devices' memory
    /// is read again.
    std::vector<int> torn() const;

  private:
    const WritePlan& plan_;
    const Buffers& buffers_;
    DeviceWitness devices_;
    std::vector<std::uint64_t> before_;
    std::vector<std::atomic<std::uint64_t>> after_;
    std::vector<std::atomic<bool>> lost_;
};

}  // namespace datastates
