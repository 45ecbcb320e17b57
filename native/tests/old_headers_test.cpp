/// A build with old kernel headers must still use what the running kernel has. This program
/// compiles the sources under test as if the headers were old (old_headers.hpp), but not this file.
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.hpp"
#include "datastates/io/file.hpp"
#include "datastates/memory/host_cache.hpp"
#include "support.hpp"

using namespace datastates;

TEST(memory_is_populated) {
#ifdef MADV_POPULATE_WRITE
    const std::size_t page = page_size();
    support::Bytes probe(2 * page);
    const auto at = reinterpret_cast<std::uintptr_t>(probe.data());
    auto* const aligned = probe.data() + ((page - (at % page)) % page);
    if (::madvise(aligned, page, MADV_POPULATE_WRITE) != 0) {
        std::cout << "SKIPPED: the kernel populates nothing\n" << std::flush;
        return;
    }
    constexpr std::size_t kBytes = std::size_t{4} << 20;
    HostCache cache(kBytes, kBytes / 4);
    cache.reserve(kBytes);
    cache.wait_settled();
    const std::span<std::byte> memory = cache.populated();
    CHECK_EQ(memory.size(), kBytes);
    std::vector<unsigned char> resident(kBytes / page);
    CHECK_EQ(::mincore(memory.data(), memory.size(), resident.data()), 0);
    CHECK(std::ranges::all_of(resident, [](unsigned char one) { return (one & 1U) != 0; }));
#else
    std::cout << "SKIPPED: the headers here are old themselves\n" << std::flush;
#endif
}

TEST(the_alignment_of_direct_io_is_known) {
#if defined(STATX_DIOALIGN) && defined(SYS_statx)
    const support::TempDir dir;
    const std::string path = dir / "f";
    const File file = File::create(path, true);
    struct statx status{};
    if (!file.direct() ||
        ::syscall(SYS_statx, file.direct_fd(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0 ||
        (status.stx_mask & STATX_DIOALIGN) == 0) {
        std::cout << "SKIPPED: the kernel does not tell\n" << std::flush;
        return;
    }
    CHECK_EQ(file.memory_alignment(), status.stx_dio_mem_align);
    CHECK_EQ(file.offset_alignment(), status.stx_dio_offset_align);
#else
    std::cout << "SKIPPED: the headers here are old themselves\n" << std::flush;
#endif
}

CHECK_MAIN()
