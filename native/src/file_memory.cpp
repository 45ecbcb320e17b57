#include "datastates/file_memory.hpp"

#include <sys/mman.h>

#include "datastates/file.hpp"

namespace datastates {

FileMemory::FileMemory(const File& file, std::size_t length) {
    if (length == 0) return;
    void* const memory =
        ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, file.buffered_fd(), 0);
    if (memory != MAP_FAILED) bytes_ = {static_cast<std::byte*>(memory), length};
}

FileMemory::~FileMemory() {
    if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

void FileMemory::let_go(std::span<std::byte> part) {
    // Advice: whatever is left of it is unmapped with the rest.
    static_cast<void>(::madvise(part.data(), part.size(), MADV_DONTNEED));
}

}  // namespace datastates
