#include "datastates/io/descriptor_file.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"
#include "datastates/base/page.hpp"
#include "datastates/io/io_backend.hpp"

namespace datastates {
namespace {

// What the umask leaves of it, as of any new file.
constexpr mode_t kMode = 0666;
// Devices take requests of this many bytes and more.
constexpr std::uint64_t kRequest = std::uint64_t{512} << 10;

// The following are defined here, so that the build does not depend on the system's headers.
// The number of cachestat(2), since Linux 6.5, on all architectures but one.
constexpr long kCachestat = 451;
// STATX_DIOALIGN, since Linux 6.1, and the offset of stx_dio_mem_align in struct statx.
// stx_dio_offset_align follows it.
constexpr unsigned kDirectAlignment = 0x2000;
constexpr std::size_t kAlignmentAt = 0x98;
static_assert(sizeof(struct statx) == 256);
// FUSE_SUPER_MAGIC, since the headers of Linux 5.11.
constexpr std::uint32_t kFuse = 0x65735546;
struct CacheRange {
    std::uint64_t offset;
    std::uint64_t length;
};
struct CacheStatus {
    std::uint64_t cached;  // pages
    std::uint64_t dirty, writeback, evicted, recently_evicted;
};

/// Calls `syscall` until it is not interrupted, with a fault point before each try.
/// Returns the errno, 0 for success.
template <typename Syscall>
int retry(fault::Point point, Syscall&& syscall) {
    for (;;) {
        int error = fault::hit_error(point);
        if (error == 0) error = syscall() < 0 ? errno : 0;
        if (error != EINTR) return error;
    }
}

bool is(const struct statfs& status, std::uint32_t kind) {
    return std::cmp_equal(status.f_type, kind);
}

/// Runs a request's steps. `syscall` makes one and returns as pread and pwrite do.
template <typename Syscall>
IoCompletion carry_out(const IoRequest& request, DescriptorFile* file, Syscall&& syscall) {
    Transfer state(request, file);
    if (request.length == 0) return state.completion();
    for (;;) {
        int injected = 0;
        const Transfer::Step step = state.next(&injected);
        ssize_t result = -injected;
        if (injected == 0) {
            result = syscall(step);
            if (result < 0) result = -errno;
        }
        if (state.advance(result, step) == Transfer::Next::finished) return state.completion();
    }
}

}  // namespace

DescriptorFile::DescriptorFile(std::string path, int flags, bool want_direct)
    : File(std::move(path)) {
    int fd = -1;
    const int error = retry(fault::Point::open, [&] {
        fd = ::open(path_.c_str(), flags | O_CLOEXEC, kMode);
        return fd;
    });
    if (error != 0) throw Error::io(error, "open", path_);
    buffered_ = FileDescriptor(fd);
    // Nothing needs the kind of the file system: what is unknown counts as a usual one.
    struct statfs status{};
    if (::fstatfs(fd, &status) == 0) {
        traits_.in_memory = is(status, TMPFS_MAGIC) || is(status, RAMFS_MAGIC);
        by_handle_ = is(status, kFuse);
        compresses_ = is(status, BTRFS_SUPER_MAGIC);
    }
    if (!want_direct || traits_.in_memory) return;

    // A file system without direct I/O refuses this open, or later the first transfer.
    const int direct = ::open(path_.c_str(), (flags & O_ACCMODE) | O_DIRECT | O_CLOEXEC);
    if (direct < 0) return;
    direct_fd_ = FileDescriptor(direct);
    direct_ = true;
    probe_alignment();
}

DescriptorFile DescriptorFile::create(const std::string& path, bool want_direct) {
    // A shared mapping needs read access too.
    return {path, O_CREAT | O_EXCL | O_RDWR, want_direct};
}

DescriptorFile DescriptorFile::reopen(const std::string& path, bool want_direct) {
    return {path, O_RDWR, want_direct};
}

DescriptorFile DescriptorFile::open(const std::string& path, bool want_direct, bool in_order) {
    DescriptorFile file(path, O_RDONLY, want_direct);
    // Besides direct I/O, only sparse extents go through the page cache. will_need() asks for
    // these, so the kernel should not read ahead by itself. This is only advice.
    if (file.direct() && !in_order) ::posix_fadvise(file.buffered_fd(), 0, 0, POSIX_FADV_RANDOM);
    if (file.traits().in_memory) file.map_for_loading();
    return file;
}

std::optional<DescriptorFile> DescriptorFile::again() const {
    try {
        // Not by its path, which may lead to another file by now.
        DescriptorFile file("/proc/self/fd/" + std::to_string(buffered_.get()), O_RDONLY, false);
        file.path_ = path_;
        return file;
    } catch (const Error&) {
        return std::nullopt;
    }
}

void DescriptorFile::probe_alignment() {
    // Linux before 6.1 does not report it.
    struct statx status{};
    if (::statx(direct_fd_.get(), "", AT_EMPTY_PATH, kDirectAlignment, &status) != 0) return;
    if ((status.stx_mask & kDirectAlignment) == 0) return;
    std::array<std::uint32_t, 2> alignment{};  // of memory, of offsets
    std::memcpy(alignment.data(), reinterpret_cast<const std::byte*>(&status) + kAlignmentAt,
                sizeof alignment);
    if (alignment[1] == 0) {
        drop_direct();
        return;
    }
    traits_.memory_alignment = std::max<std::size_t>(alignment[0], 1);
    traits_.offset_alignment = alignment[1];
}

struct stat DescriptorFile::status() const {
    struct stat status{};
    if (::fstat(buffered_.get(), &status) != 0) throw Error::io(errno, "fstat", path_);
    return status;
}

std::uint64_t DescriptorFile::size() const { return static_cast<std::uint64_t>(status().st_size); }

bool DescriptorFile::cached(std::uint64_t offset, std::uint64_t length) const {
    if (traits_.in_memory || length == 0) return true;
    CacheRange range{.offset = offset, .length = length};
    CacheStatus status{};
    // Old kernels refuse the call, as do seccomp and files of other users. Then count the range as
    // not cached.
    if (::syscall(kCachestat, buffered_.get(), &range, &status, 0) != 0) return false;
    return status.cached >= pages_touched(offset, length, page_size());
}

void DescriptorFile::will_need(std::uint64_t offset, std::uint64_t length) const {
    // The kernel reads no more for a call than the device takes in one request. This is only
    // advice.
    for (std::uint64_t at = 0; at < length; at += kRequest) {
        ::posix_fadvise(buffered_.get(), static_cast<off_t>(offset + at),
                        static_cast<off_t>(std::min(kRequest, length - at)), POSIX_FADV_WILLNEED);
    }
}

bool DescriptorFile::allocate(std::uint64_t offset, std::uint64_t length) const {
    if (length == 0) return true;
    if (compresses_) return false;
    const int error = retry(fault::Point::allocate, [&] {
        return ::fallocate(buffered_.get(), 0, static_cast<off_t>(offset),
                           static_cast<off_t>(length));
    });
    if (error == 0) return true;
    // Whatever else it reports, the file can do without: the writes will tell.
    if (error == ENOSPC || error == EDQUOT) throw Error::io(error, "allocate", path_);
    return false;
}

/// Maps the file, unless it has holes, as a copied file may. Loading from a hole of a mapping would
/// allocate memory, and raise SIGBUS where there is none.
void DescriptorFile::map_for_loading() {
    constexpr std::uint64_t kBlock = 512;  // the unit of st_blocks on every file system
    const struct stat status = this->status();
    const auto length = static_cast<std::uint64_t>(status.st_size);
    if (static_cast<std::uint64_t>(status.st_blocks) * kBlock < length) return;
    memory_ = std::make_unique<FileMemory>(*this, length, FileMemory::Access::load);
}

void DescriptorFile::map(std::uint64_t length) {
    memory_ = std::make_unique<FileMemory>(*this, length, FileMemory::Access::store);
}

void DescriptorFile::let_go(std::uint64_t offset, std::uint64_t length) const {
    if (memory_ && memory().size() >= offset + length) memory_->let_go(offset, length);
}

IoCompletion DescriptorFile::transfer(const IoRequest& request) {
    const std::span<std::byte> mapped = memory();
    if (!mapped.empty() && mapped.size() >= request.offset + request.length) {
        return carry_out(request, this, [&](const Transfer::Step& step) {
            std::byte* const place = mapped.data() + step.offset;
            const bool reads = request.kind == IoKind::read;
            std::memcpy(reads ? step.buffer : place, reads ? place : step.buffer, step.length);
            return static_cast<ssize_t>(step.length);
        });
    }
    return carry_out(request, this, [&](const Transfer::Step& step) {
        const auto offset = static_cast<off_t>(step.offset);
        return request.kind == IoKind::read ? ::pread(step.fd, step.buffer, step.length, offset)
                                            : ::pwrite(step.fd, step.buffer, step.length, offset);
    });
}

void DescriptorFile::sync() const {
    const auto sync = [&](const FileDescriptor& descriptor) {
        const int error = retry(fault::Point::sync, [&] { return ::fsync(descriptor.get()); });
        if (error != 0) throw Error::io(error, "sync", path_);
    };
    sync(buffered_);
    if (by_handle_ && direct_fd_.valid()) sync(direct_fd_);
}

void DescriptorFile::write_all(std::span<const std::byte> data, std::uint64_t offset) {
    if (data.empty()) return;
    // IoRequest also serves reads; a write does not change the buffer.
    auto* buffer = const_cast<std::byte*>(data.data());  // NOLINT(*-const-cast)
    const IoRequest request{.kind = IoKind::write,
                            .file = this,
                            .buffer = buffer,
                            .length = data.size(),
                            .required = data.size(),
                            .offset = offset,
                            .token = 0};
    const IoCompletion completion = transfer(request);
    if (!completion.ok()) throw io_error(completion, request);
}

void DescriptorFile::close_written(std::uint64_t length, bool trim) {
    if (const std::uint64_t found = size(); found != length) {
        throw Error(ErrorCode::io, EIO, "write", path_,
                    "write " + path_ + ": the file has " + std::to_string(found) + " bytes after " +
                        std::to_string(length) +
                        " were written and synced: its file system does not keep files as they "
                        "are written. Mount it with other options, or save to another one");
    }
    if (trim && ::ftruncate(buffered_.get(), static_cast<off_t>(length)) != 0) {
        throw Error::io(errno, "truncate", path_);
    }
    memory_.reset();
    int error = fault::hit_error(fault::Point::close);
    for (FileDescriptor* const descriptor : {&direct_fd_, &buffered_}) {
        if (const int failed = descriptor->close(); error == 0) error = failed;
    }
    if (error != 0 && error != EINTR) throw Error::io(error, "close", path_);
}

void DescriptorFile::close() {
    memory_.reset();
    direct_fd_.reset();
    buffered_.reset();
}

}  // namespace datastates
