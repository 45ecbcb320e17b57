#include "datastates/memory/guarded_copy.hpp"

#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"

namespace datastates {
namespace {

// Up to this many stretches, single calls cost less than a file.
constexpr std::size_t kFew = 64;

iovec stretch(const std::byte* data, std::size_t bytes) {
    return {.iov_base = const_cast<std::byte*>(data), .iov_len = bytes};
}

/// Lets the kernel copy within this process. Returns how many bytes it copied, or -1 with errno.
ssize_t read_own(const HostCopy& copy) {
    if (const int error = fault::hit_error(fault::Point::host_read); error != 0) {
        errno = error;
        return -1;
    }
    const iovec to = stretch(copy.to, copy.bytes);
    const iovec from = stretch(copy.from, copy.bytes);
    return ::process_vm_readv(::getpid(), &to, 1, &from, 1, 0);
}

HostCopy rest_of(const HostCopy& copy, std::size_t done) {
    return {.to = copy.to + done, .from = copy.from + done, .bytes = copy.bytes - done};
}

}  // namespace

GuardedCopies::~GuardedCopies() {
    if (mapped_ != nullptr) ::munmap(mapped_, kGathered);
    if (file_ >= 0) ::close(file_);
}

bool GuardedCopies::open_file() {
    if (file_ < 0) file_ = ::memfd_create("datastates", MFD_CLOEXEC);
    return file_ >= 0;
}

bool GuardedCopies::copy(const HostCopy& copy) {
    HostCopy left = copy;
    while (left.bytes > 0) {
        const ssize_t done = read_own(left);
        if (done <= 0) break;
        left = rest_of(left, static_cast<std::size_t>(done));
    }
    if (left.bytes == 0) return true;
    // The memory may still be readable: the call may be forbidden, or not reach a driver's mapping.
    const int error = errno;
    if (!open_file()) {
        if (error == EFAULT) return false;
        throw Error::io(error, "process_vm_readv", "");
    }
    while (left.bytes > 0) {
        HostCopy next = left;
        next.bytes = std::min(left.bytes, kMostBytes);
        if (through_file({&next, 1}) == 0) return false;
        left = rest_of(left, next.bytes);
    }
    return true;
}

void GuardedCopies::copy(std::span<const HostCopy> copies,
                         const std::function<void(std::size_t)>& lost) {
    const bool by_file = open_file();
    for (std::size_t i = 0; i < copies.size();) {
        const std::size_t count =
            by_file ? through_file(copies.subspan(i, std::min(kMost, copies.size() - i)))
                    : static_cast<std::size_t>(copy(copies[i]));
        if (count == 0) lost(i);
        i += std::max<std::size_t>(count, 1);
    }
}

/// Maps the file for gather(). Null where that fails.
const std::byte* GuardedCopies::map() {
    if (mapped_ != nullptr || !open_file()) return mapped_;
    if (::ftruncate(file_, kGathered) != 0) return nullptr;
    void* const memory = ::mmap(nullptr, kGathered, PROT_READ, MAP_SHARED, file_, 0);
    if (memory != MAP_FAILED) mapped_ = static_cast<std::byte*>(memory);
    return mapped_;
}

const std::byte* GuardedCopies::gather(std::span<const std::span<const std::byte>> stretches,
                                       const std::function<void(std::size_t)>& lost) {
    const bool few = stretches.size() <= kFew && gathered_.empty();  // at the first call
    if ((few && mapped_ == nullptr) || map() == nullptr) {
        gathered_.resize(kGathered);
        std::byte* to = gathered_.data();
        for (std::size_t i = 0; i < stretches.size(); to += stretches[i++].size()) {
            const auto [from, bytes] = std::pair(stretches[i].data(), stretches[i].size());
            if (!copy({.to = to, .from = from, .bytes = bytes})) lost(i);
        }
        return gathered_.data();
    }
    std::array<iovec, kMost> parts;
    std::size_t at = 0;
    for (std::size_t i = 0; i < stretches.size();) {
        const auto next = stretches.subspan(i, std::min(kMost, stretches.size() - i));
        std::ranges::transform(next, parts.begin(), [](std::span<const std::byte> data) {
            return stretch(data.data(), data.size());
        });
        const ssize_t written =
            ::pwritev(file_, parts.data(), static_cast<int>(next.size()), static_cast<off_t>(at));
        if (written < 0 && errno != EFAULT) throw Error::io(errno, "pwritev", "memory");
        const std::size_t end = at + static_cast<std::size_t>(std::max<ssize_t>(written, 0));
        const std::size_t first = i;
        while (i < stretches.size() && i - first < next.size() && at + stretches[i].size() <= end) {
            at += stretches[i++].size();
        }
        if (i > first) continue;
        lost(i);
        at += stretches[i++].size();
    }
    return mapped_;
}

/// Makes copies by writing the sources to the file and reading it back. Returns how many of the
/// first ones are done: 0 where the first source is not readable. This also reaches a driver's
/// mappings.
std::size_t GuardedCopies::through_file(std::span<const HostCopy> copies) const {
    std::array<iovec, kMost> stretches;
    const auto fill = [&](std::size_t count, auto&& of) {
        std::ranges::transform(copies.first(count), stretches.begin(), of);
        return static_cast<int>(count);
    };
    const int all = fill(copies.size(), [](const HostCopy& c) { return stretch(c.from, c.bytes); });
    const ssize_t written = ::pwritev(file_, stretches.data(), all, 0);
    if (written < 0 && errno != EFAULT) throw Error::io(errno, "pwritev", "memory");
    std::size_t count = 0;
    std::size_t bytes = 0;
    while (count < copies.size() &&
           bytes + copies[count].bytes <= static_cast<std::size_t>(std::max<ssize_t>(written, 0))) {
        bytes += copies[count++].bytes;
    }
    const int whole = fill(count, [](const HostCopy& c) { return stretch(c.to, c.bytes); });
    if (count > 0 && ::preadv(file_, stretches.data(), whole, 0) != static_cast<ssize_t>(bytes)) {
        throw Error::io(errno, "preadv", "memory");
    }
    return count;
}

}  // namespace datastates
