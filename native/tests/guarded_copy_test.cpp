#include "datastates/memory/guarded_copy.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <random>
#include <set>
#include <vector>

#include "check.hpp"
#include "datastates/base/error.hpp"
#include "datastates/base/fault.hpp"
#include "support.hpp"

using namespace datastates;
using support::Bytes;

namespace {

constexpr std::size_t kPage = 4096;

/// Memory of which every second page is not readable.
class HalfThere {
  public:
    explicit HalfThere(std::size_t pages) : size_(pages * kPage) {
        memory_ = static_cast<std::byte*>(
            ::mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        for (std::size_t i = 0; i < size_; ++i) memory_[i] = static_cast<std::byte>(i * 7);
        for (std::size_t at = kPage; at < size_; at += 2 * kPage) {
            ::mprotect(memory_ + at, kPage, PROT_NONE);
        }
    }
    ~HalfThere() { ::munmap(memory_, size_); }
    HalfThere(const HalfThere&) = delete;
    HalfThere& operator=(const HalfThere&) = delete;

    const std::byte* at(std::size_t offset) const { return memory_ + offset; }
    static bool there(std::size_t offset, std::size_t bytes) {
        for (std::size_t page = offset / kPage; page * kPage < offset + bytes; ++page) {
            if (page % 2 == 1) return false;
        }
        return true;
    }

  private:
    std::size_t size_;
    std::byte* memory_;
};

/// Runs a test with copies by process_vm_readv, and with copies through the file.
void with_each_way(void (*test)()) {
    test();
    for (const int error : {ENOSYS, EPERM, EFAULT}) {
        const support::FaultScope disarmed;
        fault::arm("host_read", "fail", error, 1, 0);
        test();
    }
}

}  // namespace

TEST(what_is_there_is_copied_and_what_is_not_is_told) {
    with_each_way([] {
        std::mt19937_64 random(1);
        const HalfThere memory(64);
        GuardedCopies copies;
        for (int round = 0; round < 200; ++round) {
            const std::size_t offset = random() % (63 * kPage);
            const std::size_t bytes = random() % kPage;
            Bytes to(bytes);
            const bool found = copies.copy({to.data(), memory.at(offset), bytes});
            CHECK_EQ(found, HalfThere::there(offset, bytes));
            if (found) CHECK(std::equal(to.begin(), to.end(), memory.at(offset)));
        }
    });
}

TEST(of_many_at_once_each_is_told_by_itself) {
    with_each_way([] {
        std::mt19937_64 random(2);
        const HalfThere memory(64);
        for (const std::size_t count : {0UL, 1UL, 7UL, 256UL, 1000UL}) {
            std::vector<Bytes> to(count);
            std::vector<HostCopy> wanted;
            std::set<std::size_t> expected;
            for (std::size_t i = 0; i < count; ++i) {
                const std::size_t offset = random() % (63 * kPage);
                to[i].resize(random() % 900);
                wanted.push_back({to[i].data(), memory.at(offset), to[i].size()});
                if (!HalfThere::there(offset, to[i].size())) expected.insert(i);
            }
            std::set<std::size_t> lost;
            GuardedCopies copies;
            copies.copy(wanted, [&](std::size_t i) { lost.insert(i); });
            CHECK(lost == expected);
            for (std::size_t i = 0; i < count; ++i) {
                if (lost.contains(i)) continue;
                CHECK(std::equal(to[i].begin(), to[i].end(), wanted[i].from));
            }
        }
    });
}

TEST(large_memory_is_copied_whole) {
    with_each_way([] {
        std::mt19937_64 random(3);
        const Bytes from = support::random_bytes(random, (3 << 20) + 5);
        Bytes to(from.size());
        GuardedCopies copies;
        CHECK(copies.copy({to.data(), from.data(), from.size()}));
        CHECK(to == from);
    });
}

TEST(what_is_gathered_lies_one_behind_the_other) {
    const HalfThere memory(64);
    std::mt19937_64 random(5);
    GuardedCopies copies;
    for (const std::size_t count : {1, 20, 200, 700, 3}) {
        std::vector<std::span<const std::byte>> stretches;
        std::set<std::size_t> gone;
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t offset = random() % (63 * kPage);
            const std::size_t bytes = 1 + (random() % 80);
            stretches.emplace_back(memory.at(offset), bytes);
            if (!HalfThere::there(offset, bytes)) gone.insert(i);
        }
        std::set<std::size_t> lost;
        const std::byte* data = copies.gather(stretches, [&](std::size_t i) { lost.insert(i); });
        CHECK(lost == gone);
        for (std::size_t i = 0; i < count; data += stretches[i++].size()) {
            CHECK(gone.contains(i) ||
                  std::ranges::equal(stretches[i], std::span(data, stretches[i].size())));
        }
    }
}

CHECK_MAIN()
