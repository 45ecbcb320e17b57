#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "datastates/base/unmovable.hpp"

namespace datastates {

class DescriptorFile;

/// A mapping of a file that lives in memory, for stores or loads. Owned by its file. The mapping is
/// advised as sequential, so that the kernel does not mark its pages as used: threads would wait
/// for each other at the kernel's page lists.
class FileMemory : Unmovable {
  public:
    enum class Access : std::uint8_t { load, store };

    /// Maps the first `length` bytes; stays empty where the system cannot. REQUIRES: they are
    /// allocated and stay allocated, as touching a missing page may raise SIGBUS.
    FileMemory(const DescriptorFile& file, std::size_t length, Access access);
    ~FileMemory();

    std::span<std::byte> bytes() const { return bytes_; }
    /// Notes that a part is no longer used, once for each part. The pages are taken out of the page
    /// tables by stretches: each time, the kernel interrupts all processors. The file keeps its
    /// bytes, and they can still be used. Thread-safe.
    void let_go(std::uint64_t offset, std::uint64_t length);

  private:
    /// Bytes whose pages are taken out of the page tables at a time.
    static constexpr std::uint64_t kStretch = std::uint64_t{64} << 20;
    /// A stretch is done when at most this part of it is still used. It may lie between extents.
    static constexpr std::uint64_t kUsed = 16;

    std::span<std::byte> stretch(std::size_t number) const;

    std::span<std::byte> bytes_;
    std::vector<std::atomic<std::uint64_t>> unused_;  // bytes, by stretch
};

}  // namespace datastates
