#pragma once

#include <sys/stat.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "datastates/base/descriptor.hpp"
#include "datastates/io/file_memory.hpp"

namespace datastates {

/// An open file. It holds a buffered descriptor and, where the file system takes direct I/O, a
/// second one with O_DIRECT; a transfer goes through the direct one when its place, length and
/// memory are aligned for it. The page cache keeps the two coherent. A file that lives in memory
/// (tmpfs) has nothing to gain from direct I/O, and never uses it.
class File {
  public:
    /// Creates a file for writing; it must not exist.
    static File create(const std::string& path, bool want_direct);
    /// Opens an existing file for reading; one that lives in memory, all of it, is mapped, if the
    /// system can.
    static File open(const std::string& path, bool want_direct);

    File(File&& other) noexcept;
    File& operator=(File&&) = delete;
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    ~File() = default;

    const std::string& path() const { return path_; }

    /// Whether a file is memory and nothing else, as on tmpfs. Throws Error "io".
    static bool in_memory(const std::string& path);
    /// Whether this one is.
    bool memory_backed() const { return memory_backed_; }
    /// Whether the range can be had without the storage device, as far as the kernel tells. It only
    /// chooses between two ways to read, both right. Thread-safe.
    bool cached(std::uint64_t offset, std::uint64_t length) const;
    /// Lets the kernel read the range into the page cache, if it cares to. Thread-safe.
    void will_need(std::uint64_t offset, std::uint64_t length) const;
    /// Whether direct I/O is in use. Thread-safe.
    bool direct() const { return direct_.load(std::memory_order_relaxed); }
    /// What direct I/O asks of a memory address, and of an offset and a length.
    std::size_t memory_alignment() const { return memory_alignment_; }
    std::size_t offset_alignment() const { return offset_alignment_; }
    /// Goes on buffered, for good: the file system took O_DIRECT and then refused a transfer.
    void drop_direct() { direct_.store(false, std::memory_order_relaxed); }
    /// Whether this transfer can go past the page cache. Thread-safe.
    bool fits_direct(const void* memory, std::size_t length, std::uint64_t offset) const;
    int direct_fd() const { return direct_fd_.get(); }
    int buffered_fd() const { return buffered_.get(); }

    std::uint64_t size() const;
    /// Reserves space; false where the file system cannot, an error where it is full. Thread-safe.
    bool allocate(std::uint64_t offset, std::uint64_t length) const;
    /// Lets a memory-backed file of `length` bytes, all of them allocated, be stored into, if the
    /// system can. Once, before other threads have to do with the file.
    void map(std::uint64_t length);
    /// What may be stored to, or loaded from where the file was opened: all that was mapped, or
    /// nothing. Until truncate or close.
    std::span<std::byte> memory() const {
        return memory_ ? memory_->bytes() : std::span<std::byte>();
    }
    /// Takes a range that threads are through with out of the page tables, if it is mapped, which
    /// the end would otherwise have to do in one thread. Thread-safe.
    void let_go(std::uint64_t offset, std::uint64_t length) const;
    void truncate(std::uint64_t length);
    /// fsync.
    void sync() const;
    /// Writes everything, past short writes and interrupts. Blocking.
    void write_all(std::span<const std::byte> data, std::uint64_t offset);
    void close();

  private:
    File(std::string path, int flags, bool want_direct);
    void probe_alignment();
    void map_for_loading();
    struct stat status() const;

    std::string path_;
    FileDescriptor buffered_;
    FileDescriptor direct_fd_;
    std::size_t memory_alignment_ = 4096;
    std::size_t offset_alignment_ = 4096;
    bool memory_backed_ = false;
    std::atomic<bool> direct_ = false;
    std::unique_ptr<FileMemory> memory_;
};

}  // namespace datastates
