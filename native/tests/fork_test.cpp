/// A forked child must keep none of the parent's open files and rings.
#include <linux/sched.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <filesystem>
#include <fstream>

#include "check.hpp"
#include "datastates/io/uring_backend.hpp"
#include "support.hpp"

using namespace datastates;

namespace {

/// How many descriptors and mappings of this process have a name with `part` in it.
int held(const std::string& part) {
    int count = 0;
    for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
        std::error_code gone;
        const auto target = std::filesystem::read_symlink(entry.path(), gone);
        if (!gone && target.string().find(part) != std::string::npos) ++count;
    }
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) {
        if (line.find(part) != std::string::npos) ++count;
    }
    return count;
}

int held_by_a_child(const std::string& part) {
    const pid_t child = ::fork();
    if (child == 0) ::_exit(held(part));
    int status = -1;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status));
    return WEXITSTATUS(status);
}

/// The memory of this process that drivers and rings have pinned, in kilobytes.
long pinned() { return support::process_status("VmPin"); }

std::unique_ptr<UringBackend> ring() {
    try {
        return std::make_unique<UringBackend>(4);
    } catch (const Error& error) {
        std::cout << "SKIPPED: no io_uring here: " << error.what() << "\n" << std::flush;
        return nullptr;
    }
}

}  // namespace

TEST(files_and_their_mappings) {
    for (const support::Setup& setup : support::setups()) {
        const support::TempDir dir(setup);
        const std::string path = dir / "kept-by-nobody";
        DescriptorFile file = DescriptorFile::create(path, true);
        file.write_all(support::Bytes(100000), 0);
        if (file.traits().in_memory) file.map(100000);
        const DescriptorFile opened = DescriptorFile::open(path, true);
        DescriptorFile moved = DescriptorFile::open(path, false);
        DescriptorFile again = std::move(moved);
        CHECK(held("kept-by-nobody") >= 3);
        CHECK_EQ(held_by_a_child("kept-by-nobody"), 0);
        again.close();
        CHECK_EQ(held_by_a_child("kept-by-nobody"), 0);
        file.sync();  // the parent's file still works
        CHECK_EQ(support::read_file(path).size(), 100000U);
    }
}

TEST(rings) {
    const auto backend = ring();
    if (!backend) return;
    CHECK(held("io_uring") >= 1);
    CHECK_EQ(held_by_a_child("io_uring"), 0);
    CHECK_EQ(held_by_a_child("eventfd"), 0);
}

TEST(memory_of_a_ring_that_is_gone_though_a_child_has_it) {
    auto backend = ring();
    if (!backend) return;
    const long before = pinned();
    constexpr std::size_t kBytes = std::size_t{1} << 20;
    support::Aligned memory(kBytes);
    backend->register_memory({memory.data(), kBytes}, kBytes);
    if (pinned() == before) {
        std::cout << "SKIPPED: the kernel registers no memory\n" << std::flush;
        return;
    }
    // A fork that runs no handlers, like vfork before its exec.
    const auto child = static_cast<pid_t>(::syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
    if (child == 0) {
        for (;;) ::pause();
    }
    backend.reset();
    const long after = pinned();
    ::kill(child, SIGKILL);
    CHECK_EQ(::waitpid(child, nullptr, 0), child);
    CHECK_EQ(after, before);
}

CHECK_MAIN()
