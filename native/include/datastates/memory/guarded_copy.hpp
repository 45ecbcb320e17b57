#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace datastates {

/// Host memory to be copied.
struct HostCopy {
    std::byte* to;
    const std::byte* from;
    std::size_t bytes;
};

/// Copies host memory that its owner may have given back by now. The kernel reads it: what is gone
/// is an answer then, where a processor's load would end the process by a signal. One thread's.
class GuardedCopies {
  public:
    GuardedCopies() = default;
    ~GuardedCopies();
    GuardedCopies(const GuardedCopies&) = delete;
    GuardedCopies& operator=(const GuardedCopies&) = delete;
    GuardedCopies(GuardedCopies&&) = delete;
    GuardedCopies& operator=(GuardedCopies&&) = delete;

    /// False where some of it is gone; what is at its destination is undefined then. Throws Error
    /// "io" where the system lets us ask the kernel in no way.
    bool copy(const HostCopy& copy);
    /// Many short ones, for the price of a few calls. `lost` gets the number of each that is gone.
    void copy(std::span<const HostCopy> copies, const std::function<void(std::size_t)>& lost);
    /// Brings short stretches together, one behind the other, up to kGathered bytes: the memory is
    /// ours, and theirs until the next call. `lost` as above.
    const std::byte* gather(std::span<const std::span<const std::byte>> stretches,
                            const std::function<void(std::size_t)>& lost);
    static constexpr std::size_t kGathered = std::size_t{64} << 10;
    /// So many at once, of so many bytes together.
    static constexpr std::size_t kMost = 256;
    static constexpr std::size_t kMostBytes = std::size_t{256} << 10;

  private:
    bool open_file();
    std::size_t through_file(std::span<const HostCopy> copies) const;

    const std::byte* map();

    int file_ = -1;  // in memory; only where it is needed
    std::byte* mapped_ = nullptr;
    std::vector<std::byte> gathered_;  // where it cannot be mapped, or is not worth it
};

}  // namespace datastates
