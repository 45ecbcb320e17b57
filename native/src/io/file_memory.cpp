#include "datastates/io/file_memory.hpp"

#include <sys/mman.h>

#include <algorithm>

#include "datastates/io/descriptor_file.hpp"

namespace datastates {

FileMemory::FileMemory(const DescriptorFile& file, std::size_t length, Access access)
    : unused_((length + kStretch - 1) / kStretch) {
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

void FileMemory::let_go(std::uint64_t offset, std::uint64_t length) {
    for (std::uint64_t at = offset; at < offset + length;) {
        const std::size_t number = at / kStretch;
        const std::uint64_t end = std::min(offset + length, (number + 1) * kStretch);
        const std::span<std::byte> whole = stretch(number);
        const std::uint64_t enough = whole.size() - (whole.size() / kUsed);
        const std::uint64_t before = unused_[number].fetch_add(end - at);
        if (before < enough && before + (end - at) >= enough) {
            // Advice: if it is ignored, the destructor unmaps the pages.
            static_cast<void>(::madvise(whole.data(), whole.size(), MADV_DONTNEED));
        }
        at = end;
    }
}

std::span<std::byte> FileMemory::stretch(std::size_t number) const {
    const std::uint64_t begin = number * kStretch;
    return bytes_.subspan(begin, std::min(kStretch, bytes_.size() - begin));
}

}  // namespace datastates
