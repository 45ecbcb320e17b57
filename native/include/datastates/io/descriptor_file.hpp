#pragma once

#include <sys/stat.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

#include "datastates/base/descriptor.hpp"
#include "datastates/io/file.hpp"
#include "datastates/io/file_memory.hpp"

namespace datastates {

/// An open file of the system. It holds a buffered descriptor and, where the file system takes
/// direct I/O, a second one with O_DIRECT. A transfer uses the direct one when its offset, length
/// and memory are aligned for it. The kernel keeps the two coherent. A file that lives in memory
/// (tmpfs, ramfs) gains nothing from direct I/O and never uses it. Failing syscalls throw Error
/// "io".
class DescriptorFile final : public File {
  public:
    /// Creates a file for writing. It must not exist.
    static DescriptorFile create(const std::string& path, bool want_direct);
    /// Opens an existing file for writing.
    static DescriptorFile reopen(const std::string& path, bool want_direct);
    /// Opens an existing file for reading. Maps a file without holes that lives in memory, if the
    /// system can.
    /// The kernel reads ahead what is read `in_order` through the page cache.
    static DescriptorFile open(const std::string& path, bool want_direct, bool in_order = false);
    /// The same file, opened once more for reading through the page cache. Empty if the system
    /// cannot: without /proc, or with too many open files.
    std::optional<DescriptorFile> again() const;

    DescriptorFile(DescriptorFile&&) noexcept = default;

    bool cached(std::uint64_t offset, std::uint64_t length) const override;
    DescriptorFile* descriptor() override { return this; }
    /// It copies to or from the file's mapping where that covers the range, else it calls pread or
    /// pwrite. The mapping is faster with many threads: pwrite lets only one at a time into a file,
    /// and threads in pread wait for each other to mark pages as used.
    IoCompletion transfer(const IoRequest& request) override;
    void give_up(std::size_t /*order*/) override {}
    void close() override;
    /// Advises the kernel to read the range into the page cache. Thread-safe.
    void will_need(std::uint64_t offset, std::uint64_t length) const;
    /// Stops using direct I/O, after the file system has refused a transfer. Thread-safe.
    void drop_direct() { direct_.store(false, std::memory_order_relaxed); }
    int direct_fd() const { return direct_fd_.get(); }
    int buffered_fd() const { return buffered_.get(); }

    std::uint64_t size() const;
    /// Allocates space. False where the file system does not, or should not; throws where it is
    /// full. Thread-safe.
    bool allocate(std::uint64_t offset, std::uint64_t length) const;
    /// Maps the first `length` bytes of a memory-backed file for stores, if the system can.
    /// REQUIRES: they are allocated, and no other thread uses the file yet.
    void map(std::uint64_t length);
    /// The mapped bytes: for stores after map(), for loads after open(). Empty where nothing is
    /// mapped. Valid until close.
    std::span<std::byte> memory() const {
        return memory_ ? memory_->bytes() : std::span<std::byte>();
    }
    /// Notes that a mapped range is no longer used, so that its pages can be taken out of the page
    /// tables. Otherwise one thread would do this for the whole file at the end. Thread-safe.
    void let_go(std::uint64_t offset, std::uint64_t length) const;
    /// fsync of all that was written.
    void sync() const;
    /// Writes all of `data`; continues after short writes and interrupts. Blocks.
    void write_all(std::span<const std::byte> data, std::uint64_t offset);
    /// Closes a file that was written and synced. Throws Error "io" where it does not have the
    /// `length` that was written, or where the file system tells only now that it lost something.
    /// `trim`: gives back what is allocated behind the end. XFS allocates as much again as a file
    /// has when something is appended, and keeps that where allocate() was called.
    void close_written(std::uint64_t length, bool trim = false);

  private:
    DescriptorFile(std::string path, int flags, bool want_direct);
    void probe_alignment();
    void map_for_loading();
    struct stat status() const;

    FileDescriptor buffered_;
    FileDescriptor direct_fd_;
    bool by_handle_ = false;   // a server behind FUSE may treat each descriptor by itself
    bool compresses_ = false;  // Btrfs may, but never what was allocated before it was written
    std::unique_ptr<FileMemory> memory_;
};

}  // namespace datastates
