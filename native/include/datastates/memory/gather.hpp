#pragma once

#include <cstdint>
#include <string>
#include <vector>

/// A kernel that copies many pieces of device memory to page-locked host memory or to the device.
///
/// A copy by the driver takes the processor about 2 µs, in which the bus moves some 110 KiB. So
/// single copies of smaller pieces leave the bus idle. The kernel stores directly into host memory
/// and keeps the bus busy with a few warps. Copies on the device all use the kernel: beside a
/// training step's kernels, the driver took 0.2 ms to enqueue one copy, in which the device copies
/// some hundred MiB.
namespace datastates::gather {

/// The kernel copies pieces below this size to the host; the driver copies the others.
constexpr std::uint64_t kMaxPiece = std::uint64_t{128} << 10;
/// The most that one warp copies at a time. It is short, so that the warps share the work evenly.
/// It is a multiple of 16, so that all parts of a piece have the same alignment.
constexpr std::uint64_t kRangeBytes = std::uint64_t{16} << 10;

/// One copy, as the kernel reads it.
struct Range {
    std::uint64_t from;
    std::uint64_t to;
    std::uint64_t nbytes;
};

/// Appends the copy of `nbytes`, cut into ranges of at most kRangeBytes.
void add(std::vector<Range>& ranges, std::uint64_t to, std::uint64_t from, std::uint64_t nbytes);

/// PTX with one entry, `datastates_gather(u64 ranges, u32 count)`. Each warp copies one Range after
/// the other. A lane moves 16 bytes at a time where both addresses are multiples of 16, else 8, 4
/// or 1. Launch it with blocks of kKernelThreads threads.
std::string kernel_ptx();
constexpr unsigned kKernelThreads = 256;
constexpr unsigned kWarpsPerKernelBlock = kKernelThreads / 32;
/// The most blocks of a launch that copies to the host: enough to fill the bus (32 to 528 measured
/// alike), and the rest of the device is left to the training.
constexpr unsigned kBlocksToHost = 32;
/// The most blocks of a launch that copies on the device. Its memory moves about 4 MiB during one
/// access, and a warp has 2 KiB under way.
constexpr unsigned kBlocksOnDevice = 256;

}  // namespace datastates::gather
