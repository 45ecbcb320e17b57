#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "datastates/checksum/fingerprint.hpp"
#include "datastates/plan.hpp"
#include "datastates/write/device_witness.hpp"

namespace datastates {

/// Notices sources that change between submit and capture. In host memory it compares fingerprints
/// at submit with those of the captured bytes, on devices those of the memory (see DeviceWitness).
/// In host memory they are over all words if a job's witnessed sources have at most kFewAltogether
/// bytes, or if the source is short; else over samples. Owned by the WriteState. Submit sets the
/// first fingerprints before anything is captured; the other calls but `torn` are thread-safe.
class Witness {
  public:
    /// Both outlive this.
    Witness(const WritePlan& plan, const Buffers& buffers);

    /// The words of a source in host memory that its fingerprints are over.
    fingerprint::Words words(std::size_t source) const {
        const bool few = few_ || plan_.source_nbytes(source) <= fingerprint::kFew;
        return few ? fingerprint::Words::all : fingerprint::Words::samples;
    }
    /// Adds a part of a source's fingerprint at submit.
    void add_before(std::size_t source, std::uint64_t fingerprint) {
        before_[source] += fingerprint;
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
    // Reading so much at submit takes one to two milliseconds.
    static constexpr std::uint64_t kFewAltogether = std::uint64_t{16} << 20;

    const WritePlan& plan_;
    const Buffers& buffers_;
    DeviceWitness devices_;
    bool few_;
    std::vector<std::uint64_t> before_;
    std::vector<std::atomic<std::uint64_t>> after_;
    std::vector<std::atomic<bool>> lost_;
};

}  // namespace datastates
