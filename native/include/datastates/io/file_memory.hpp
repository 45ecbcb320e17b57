#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace datastates {

class File;

/// A mapping of a file that lives in memory, for stores or loads. Owned by its File. The mapping is
/// advised as sequential, so that the kernel does not mark its pages as used: threads would wait
/// for each other at the kernel's page lists.
class FileMemory {
  public:
    enum class Access : std::uint8_t { load, store };

    /// Maps the first `length` bytes; stays empty where the system cannot. REQUIRES: they are
    /// allocated and stay allocated, as touching a missing page may raise SIGBUS.
    FileMemory(const File& file, std::size_t length, Access access);
    ~FileMemory();
    FileMemory(const FileMemory&) = delete;
    FileMemory& operator=(const FileMemory&) = delete;
    FileMemory(FileMemory&&) = delete;
    FileMemory& operator=(FileMemory&&) = delete;

    std::span<std::byte> bytes() const { return bytes_; }
    /// Takes the pages of a part out of the page tables. The file keeps its bytes, and the part can
    /// still be used. Thread-safe.
    static void let_go(std::span<std::byte> part);

  private:
    std::span<std::byte> bytes_;
};

}  // namespace datastates
