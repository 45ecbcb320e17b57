#include "datastates/io/file_tail.hpp"

#include <algorithm>
#include <new>

#include "datastates/base/unmovable.hpp"

namespace datastates {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kStep = std::size_t{4} << 20;

/// Page-aligned memory, for direct I/O.
class AlignedBuffer : Unmovable {
  public:
    explicit AlignedBuffer(std::size_t bytes)
        : memory_(static_cast<std::byte*>(::operator new(bytes, std::align_val_t{kPage})), bytes) {}
    ~AlignedBuffer() { ::operator delete(memory_.data(), std::align_val_t{kPage}); }

    std::span<std::byte> memory() const { return memory_; }

  private:
    std::span<std::byte> memory_;
};

}  // namespace

// The bytes pass through one aligned buffer, for direct I/O of whole pages.
void write_tail(DescriptorFile& file, std::uint64_t at, std::span<const std::byte> head,
                std::span<const std::byte> tail) {
    const std::uint64_t nbytes = head.size() + tail.size();
    if (nbytes == 0) return;
    const AlignedBuffer buffer(static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, kStep)));
    for (const std::uint64_t end = at + nbytes; at < end;) {
        std::size_t filled = 0;
        for (auto* part : {&head, &tail}) {
            const std::size_t take = std::min(part->size(), buffer.memory().size() - filled);
            std::copy_n(part->begin(), take,
                        buffer.memory().begin() + static_cast<std::ptrdiff_t>(filled));
            *part = part->subspan(take);
            filled += take;
        }
        const std::size_t whole = filled / kPage * kPage;
        file.write_all(buffer.memory().first(whole), at);
        // The last bytes fill no page, and go through the page cache.
        file.write_all(buffer.memory().subspan(whole, filled - whole), at + whole);
        at += filled;
    }
}

}  // namespace datastates
