#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

namespace datastates {

class DescriptorFile;
struct IoCompletion;
struct IoRequest;

/// A file, owned by its job. Its kind chooses who reads it: a file of the system has descriptors,
/// see DescriptorFile. A handed one has bytes that other code hands over, see HandedFile.
class File {
  public:
    struct Traits {
        /// What direct I/O needs: of memory addresses, and of offsets and lengths.
        std::size_t memory_alignment = 4096;
        std::size_t offset_alignment = 4096;
        /// Whether the file lives in memory, as on tmpfs.
        bool in_memory = false;
        /// The most bytes of one request.
        std::size_t best_piece = SIZE_MAX;
    };

    File& operator=(File&&) = delete;
    File(const File&) = delete;
    File& operator=(const File&) = delete;
    virtual ~File() = default;

    /// Its path, or what else errors name it by.
    const std::string& path() const { return path_; }
    const Traits& traits() const { return traits_; }
    /// Whether direct I/O is in use. Thread-safe.
    bool direct() const { return direct_.load(std::memory_order_relaxed); }
    /// Whether direct I/O is in use and the transfer is aligned for it. Thread-safe.
    bool fits_direct(const void* memory, std::size_t length, std::uint64_t offset) const {
        return direct() && length % traits_.offset_alignment == 0 &&
               offset % traits_.offset_alignment == 0 &&
               reinterpret_cast<std::uintptr_t>(memory) % traits_.memory_alignment == 0;
    }
    /// Whether the range can be read without the storage device, as far as is known. Callers use it
    /// only to choose the faster of two correct ways to read. Thread-safe.
    virtual bool cached(std::uint64_t offset, std::uint64_t length) const = 0;
    /// The file with its descriptors; null where it has none.
    virtual DescriptorFile* descriptor() = 0;
    /// Does one request in the calling thread. Thread-safe.
    virtual IoCompletion transfer(const IoRequest& request) = 0;
    /// Lets requests fail whose `order` is at least this: nobody wants them any more. Thread-safe.
    virtual void give_up(std::size_t order) = 0;
    virtual void close() = 0;

  protected:
    explicit File(std::string path) : path_(std::move(path)) {}
    File(File&& other) noexcept
        : path_(std::move(other.path_)), traits_(other.traits_), direct_(other.direct()) {}

    std::string path_;
    Traits traits_;
    std::atomic<bool> direct_ = false;
};

}  // namespace datastates
