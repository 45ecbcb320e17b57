#include "datastates/io/file_memory.hpp"

#include <sys/mman.h>

#include "datastates/base/page.hpp"
#include "datastates/io/file.hpp"

namespace datastates {

FileMemory::FileMemory(const File& file, std::size_t length, Access access) {
    if (length == 0) return;
    const int protection = access == Access::store ? PROT_READ | PROT_WRITE : PROT_READ;
    void* const memory = ::mmap(nullptr, length, protection, MAP_SHARED, file.buffered_fd(), 0);
    if (memory == MAP_FAILED) return;
    bytes_ = {static_cast<std::byte*>(memory), length};
    // For such mappings the kernel does not mark pages as used. This is only advice.
    static_cast<void>(::madvise(memory, length, MADV_SEQUENTIAL));
    // Otherwise a forked child would keep a deleted file's pages.
    static_cast<void>(::madvise(memory, length, MADV_DONTFORK));
}

FileMemory::~FileMemory() {
    if (!bytes_.empty()) ::munmap(bytes_.data(), bytes_.size());
}

void FileMemory::let_go(std::span<std::byte> part) {
    const auto begin = reinterpret_cast<std::uintptr_t>(part.data());
    const std::uintptr_t before = begin % page_size();
    // Advice: if it is ignored, the destructor unmaps the pages.
    static_cast<void>(
        ::madvise(reinterpret_cast<void*>(begin - before), part.size() + before, MADV_DONTNEED));
}

}  // namespace datastates
