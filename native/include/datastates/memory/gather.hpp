#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// Many pieces of device memory, copied by one kernel: to page-locked host memory or on the device.
///
/// A copy that is asked of the driver costs the processor about 2 µs, in which the bus moves some
/// 110 KiB: below that, copies one by one leave the bus idle. The kernel stores straight into the
/// host's memory and keeps the bus full with a few warps. On the device pieces of any size go to
/// it: a copy asked of the driver beside a training step's kernels took 0.2 ms to enqueue, in which
/// the device copies some hundred MiB.
namespace datastates::gather {

/// On the way to the host, a piece below this goes to the kernel, others to the driver.
constexpr std::uint64_t kMaxPiece = std::uint64_t{128} << 10;
/// What one warp copies at a time: short, so that the warps share the work evenly; a multiple of
/// 16, so that the parts of a piece are aligned as the piece is.
constexpr std::uint64_t kRangeBytes = std::uint64_t{16} << 10;

/// What the kernel is told about each copy.
struct Range {
    std::uint64_t from;
    std::uint64_t to;
    std::uint64_t nbytes;
};

/// Appends the copy of `nbytes`, cut into ranges of at most kRangeBytes.
void add(std::vector<Range>& ranges, std::uint64_t to, std::uint64_t from, std::uint64_t nbytes);

/// PTX with one entry, `datastates_gather(u64 ranges, u32 count)`: each warp copies one Range after
/// the other, 16 bytes a lane where both addresses are multiples of 16, else 8, 4 or 1. Launch with
/// blocks of kKernelThreads.
std::string kernel_ptx();
constexpr unsigned kKernelThreads = 256;
constexpr unsigned kWarpsPerKernelBlock = kKernelThreads / 32;
/// The blocks of a launch. To the host: enough to fill the bus (32 to 528 were measured to be
/// alike); the rest of the device is the training's.
constexpr unsigned kBlocksToHost = 32;
/// On the device: its memory moves about 4 MiB in the time that one access takes, and a warp has
/// 2 KiB under way.
constexpr unsigned kBlocksOnDevice = 256;

}  // namespace datastates::gather
