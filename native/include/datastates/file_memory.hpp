#pragma once

#include <cstddef>
#include <span>

namespace datastates {

class File;

/// The pages of a file that lives in memory, for storing into them: a mapping of all of them.
class FileMemory {
  public:
    /// Maps the first `length` bytes; empty where the system cannot. REQUIRES: they are allocated.
    FileMemory(const File& file, std::size_t length);
    ~FileMemory();
    FileMemory(const FileMemory&) = delete;
    FileMemory& operator=(const FileMemory&) = delete;
    FileMemory(FileMemory&&) = delete;
    FileMemory& operator=(FileMemory&&) = delete;

    std::span<std::byte> bytes() const { return bytes_; }
    /// Takes a part out of the page tables, which the end would otherwise have to do in one thread.
    /// The file keeps its bytes. Thread-safe.
    static void let_go(std::span<std::byte> part);

  private:
    std::span<std::byte> bytes_;
};

}  // namespace datastates
