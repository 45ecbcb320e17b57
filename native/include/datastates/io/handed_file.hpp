#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "datastates/io/file.hpp"

namespace datastates {

/// A file without descriptors, for reading: its bytes are handed over by a call, as those of an
/// object in a store. The system knows nothing of it, so no range is cached, and no I/O is direct.
class HandedFile : public File {
  public:
    bool cached(std::uint64_t /*offset*/, std::uint64_t /*length*/) const override { return false; }
    DescriptorFile* descriptor() override { return nullptr; }
    /// Asks for the bytes, unless nobody wants them any more.
    IoCompletion transfer(const IoRequest& request) override;
    void give_up(std::size_t order) override;
    void close() override {}

  protected:
    /// Throws Error "invalid" for a piece of no bytes.
    HandedFile(std::string name, std::size_t best_piece);
    /// Fills `memory` with the file's bytes from `offset` on. Blocks; touches no memory once it has
    /// returned. Many threads call it at once. Throws anything.
    virtual void read(std::span<std::byte> memory, std::uint64_t offset) = 0;

  private:
    std::atomic<std::size_t> given_up_ = SIZE_MAX;
};

}  // namespace datastates
