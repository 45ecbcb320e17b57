#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace datastates {

class File;

/// The pages of a file that lives in memory, to be stored into or loaded from: a mapping of all of
/// them. What it is used for is not counted as use of the pages: the kernel's lists of them would
/// be what threads wait for.
class FileMemory {
  public:
    enum class Access : std::uint8_t { load, store };

    /// Maps the first `length` bytes; empty where the system cannot. REQUIRES: they are allocated,
    /// and stay so: to touch what is not there is a signal.
    FileMemory(const File& file, std::size_t length, Access access);
    ~FileMemory();
    FileMemory(const FileMemory&) = delete;
    FileMemory& operator=(const FileMemory&) = delete;
    FileMemory(FileMemory&&) = delete;
    FileMemory& operator=(FileMemory&&) = delete;

    std::span<std::byte> bytes() const { return bytes_; }
    /// Takes the pages of a part out of the page tables. The file keeps its bytes, and others may
    /// still use them. Thread-safe.
    static void let_go(std::span<std::byte> part);

  private:
    std::span<std::byte> bytes_;
};

}  // namespace datastates
