/// A build with old kernel headers must still use what the running kernel has. This program
/// compiles the sources under test as if the headers were old (old_headers.hpp), but not this file.
#include <fcntl.h>
#include <linux/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "check.hpp"
#include "datastates/io/descriptor_file.hpp"
#include "support.hpp"

using namespace datastates;

TEST(the_alignment_of_direct_io_is_known) {
#if defined(STATX_DIOALIGN) && defined(SYS_statx)
    const support::TempDir dir;
    const std::string path = dir / "f";
    const DescriptorFile file = DescriptorFile::create(path, true);
    struct statx status{};
    if (!file.direct() ||
        ::syscall(SYS_statx, file.direct_fd(), "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) != 0 ||
        (status.stx_mask & STATX_DIOALIGN) == 0) {
        std::cout << "SKIPPED: the kernel does not tell\n" << std::flush;
        return;
    }
    CHECK_EQ(file.traits().memory_alignment, status.stx_dio_mem_align);
    CHECK_EQ(file.traits().offset_alignment, status.stx_dio_offset_align);
#else
    std::cout << "SKIPPED: the headers here are old themselves\n" << std::flush;
#endif
}

CHECK_MAIN()
