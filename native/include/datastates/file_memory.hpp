#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>

#include "datastates/reservation.hpp"

namespace datastates {

/// The pages of a file that lives in memory, for storing into them: one mapping of its whole
/// planned length, made when it is first asked for, and the reservation that makes it safe.
class FileMemory {
  public:
    explicit FileMemory(std::uint64_t length);
    ~FileMemory();
    FileMemory(const FileMemory&) = delete;
    FileMemory& operator=(const FileMemory&) = delete;
    FileMemory(FileMemory&&) = delete;
    FileMemory& operator=(FileMemory&&) = delete;

    /// See File::memory. Thread-safe.
    std::byte* reserved_to(const File& file, std::uint64_t end);

  private:
    const std::size_t length_;
    Reservation reservation_;
    std::once_flag mapped_;
    void* memory_ = nullptr;
};

}  // namespace datastates
