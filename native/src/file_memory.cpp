#include "datastates/file_memory.hpp"

#include <sys/mman.h>

#include "datastates/file.hpp"

namespace datastates {
namespace {

// Some 20 ms of reserving: long enough for the workers to keep copying meanwhile, and short enough
// for the first ones not to wait for long.
constexpr std::uint64_t kStep = std::uint64_t{256} << 20;

}  // namespace

FileMemory::FileMemory(std::uint64_t length) : length_(length), reservation_(length, kStep) {}

FileMemory::~FileMemory() {
    if (memory_ != nullptr) ::munmap(memory_, length_);
}

std::byte* FileMemory::reserved_to(const File& file, std::uint64_t end) {
    if (end > length_) return nullptr;
    std::call_once(mapped_, [&] {
        void* const memory =
            ::mmap(nullptr, length_, PROT_READ | PROT_WRITE, MAP_SHARED, file.buffered_fd(), 0);
        if (memory != MAP_FAILED) memory_ = memory;
    });
    if (memory_ == nullptr || !reservation_.ensure(file, end)) return nullptr;
    return static_cast<std::byte*>(memory_);
}

}  // namespace datastates
