#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <vector>

#include "datastates/io/descriptor_file.hpp"

namespace datastates {

/// The streams of one file, which is read in order by a few workers at a time. The kernel reads
/// ahead for each open file by itself, so each stream has one of its own. Not thread-safe.
class Streams {
  public:
    /// One stream for every four workers, as the others verify and copy meanwhile, and at most
    /// four.
    explicit Streams(std::size_t workers)
        : most_(std::clamp(workers / kWorkers, std::size_t{1}, kMost)) {}

    /// A stream that nobody uses; null if there is none. `file` is the first one.
    DescriptorFile* take(DescriptorFile& file);
    void give_back(DescriptorFile* stream) noexcept { free_[free_count_++] = stream; }

  private:
    static constexpr std::size_t kWorkers = 4;
    static constexpr std::size_t kMost = 4;
    std::size_t most_;
    std::vector<std::unique_ptr<DescriptorFile>> opened_;  // besides the first one
    std::array<DescriptorFile*, kMost> free_{};
    std::size_t free_count_ = 0;
    std::size_t made_ = 0;
};

}  // namespace datastates
