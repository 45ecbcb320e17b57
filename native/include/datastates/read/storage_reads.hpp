#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>

#include "datastates/io/io_backend.hpp"
#include "datastates/read/reading.hpp"

namespace datastates {

/// Extents that the backend is reading from storage. Owned by the reader; belongs to its thread.
class StorageReads {
  public:
    /// `backend` outlives this.
    explicit StorageReads(IoBackend& backend) : backend_(backend) {}

    /// Begins to read an extent, by direct I/O where that is possible, in pieces that suit the
    /// file.
    void start(const std::shared_ptr<Reading>& reading);
    /// Takes a part that has ended. A failure fails the job. Returns the extent if it was its last
    /// part, else null.
    std::shared_ptr<Reading> take(const IoCompletion& completion);
    /// How many parts are under way.
    std::size_t size() const { return parts_.size(); }

  private:
    struct Part {
        std::shared_ptr<Reading> reading;
        IoRequest request;
    };
    void submit(const std::shared_ptr<Reading>& reading, std::byte* buffer, std::uint64_t offset,
                std::size_t length, std::size_t required);
    void submit_piece(const std::shared_ptr<Reading>& reading, std::byte* buffer,
                      std::uint64_t offset, std::size_t length, std::size_t required);

    IoBackend& backend_;
    std::unordered_map<std::uint64_t, Part> parts_;  // by token
    std::uint64_t next_token_ = 0;
};

}  // namespace datastates
