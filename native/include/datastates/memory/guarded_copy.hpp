#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

#include "datastates/base/unmovable.hpp"

namespace datastates {

/// One copy in host memory.
struct HostCopy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
};

/// Copies host memory that its owner may have unmapped meanwhile. It lets the kernel read the
/// memory, by process_vm_readv or writes to an in-memory file: the kernel reports unmapped memory
/// as an error, where a load would end the process by a signal. Belongs to one thread.
class GuardedCopies : Unmovable {
  public:
    GuardedCopies() = default;
    ~GuardedCopies();

    /// False where some of the source is not readable; the destination is undefined then. Throws
    /// Error "io" where the system allows neither way.
    bool copy(const HostCopy& copy);
    /// Makes many short copies with few syscalls. Calls `lost` with the index of each copy whose
    /// source is not readable.
    void copy(std::span<const HostCopy> copies, const std::function<void(std::size_t)>& lost);
    /// Copies short stretches, of at most kGathered bytes together, one behind the other. Returns
    /// where; the bytes are valid until the next call. `lost` as above.
    const std::byte* gather(std::span<const std::span<const std::byte>> stretches,
                            const std::function<void(std::size_t)>& lost);
    static constexpr std::size_t kGathered = std::size_t{64} << 10;
    /// At most kMost copies pass through the file at once. Callers give them at most kMostBytes
    /// together.
    static constexpr std::size_t kMost = 256;
    static constexpr std::size_t kMostBytes = std::size_t{256} << 10;

  private:
    bool open_file();
    std::size_t through_file(std::span<const HostCopy> copies) const;

    const std::byte* map();

    int file_ = -1;  // in memory; opened when it is needed
    std::byte* mapped_ = nullptr;
    std::vector<std::byte> gathered_;  // instead of `mapped_`: few stretches, or no mapping
};

}  // namespace datastates
