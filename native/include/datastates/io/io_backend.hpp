#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "datastates/base/error.hpp"
#include "datastates/base/timeline.hpp"
#include "datastates/io/file.hpp"

namespace datastates {

enum class IoKind : std::uint8_t { read, write };

/// One transfer between memory and a file. Both must outlive its completion.
struct IoRequest {
    IoKind kind;
    File* file;
    std::byte* buffer;
    std::size_t length;
    /// A read that meets the end of the file is whole with this many bytes (`length` for a write).
    std::size_t required;
    std::uint64_t offset;
    /// Handed back with the completion.
    std::uint64_t token;
    /// Through the page cache, also where direct I/O could do it.
    bool through_cache = false;
};

struct IoCompletion {
    std::uint64_t token = 0;
    /// 0, or why the transfer stopped.
    int error_number = 0;
    /// The file ended before `required` bytes.
    bool end_of_file = false;
    std::size_t transferred = 0;
    /// Which slot of a ring, or which thread, did it, and from when until when.
    std::uint32_t slot = 0;
    Clock::time_point begin{};
    Clock::time_point end{};

    bool ok() const { return error_number == 0 && !end_of_file; }
    void note_end(std::size_t in_slot) {
        slot = static_cast<std::uint32_t>(in_slot);
        end = Clock::now();
    }
};

/// The exception for a completion that is not ok.
Error io_error(const IoCompletion& completion, const IoRequest& request);

/// Moves buffers to and from files, many at a time. Short transfers and interrupts are continued
/// inside at the right offset, and transfers that direct I/O cannot do go through the page cache,
/// until a request is whole or has failed.
///
/// submit, reap and in_flight belong to one thread for the object's whole life; wake is for the
/// others. The destructor waits for what is in flight: no buffer is touched after it.
class IoBackend {
  public:
    IoBackend() = default;
    IoBackend(const IoBackend&) = delete;
    IoBackend& operator=(const IoBackend&) = delete;
    IoBackend(IoBackend&&) = delete;
    IoBackend& operator=(IoBackend&&) = delete;
    virtual ~IoBackend() = default;

    virtual std::string_view name() const = 0;

    /// Tells the kernel about memory that most requests will use, each within a piece of it. Best
    /// effort; called by the submitting thread, again when the memory has grown at its end.
    virtual void register_memory(std::span<std::byte> memory, std::size_t piece_bytes) = 0;

    /// Never blocks on I/O: what exceeds the queue depth waits inside. Where it throws, nothing has
    /// been submitted.
    virtual void submit(const IoRequest& request) = 0;

    /// The completions there are. With `wait` and none there yet, blocks until there is one, or
    /// `wake` was called, or nothing is in flight.
    virtual std::vector<IoCompletion> reap(bool wait) = 0;

    /// Requests submitted and not reaped.
    virtual std::size_t in_flight() const = 0;

    /// Ends a waiting reap, or the next one. Thread-safe.
    virtual void wake() = 0;
};

/// `which` is "io_uring", "pwrite" or "auto": io_uring where the kernel and the container's seccomp
/// profile allow it. `queue_depth` transfers run at a time; `threads` are the pwrite backend's.
std::unique_ptr<IoBackend> make_backend(std::string_view which, unsigned queue_depth,
                                        unsigned threads);

/// One request under way: what both backends share.
class Transfer {
  public:
    enum class Next : std::uint8_t { again, finished };
    struct Step {
        int fd;
        bool direct;
        std::byte* buffer;
        std::size_t length;
        std::uint64_t offset;
    };

    explicit Transfer(const IoRequest& request) : request_(request) {}

    /// The next syscall to make, after passing the read or write fault point. When the point says
    /// to fail, `*injected` is that errno, else 0.
    Step next(int* injected);
    /// Takes a syscall's result: a byte count or -errno.
    Next advance(ssize_t result, const Step& step);
    const IoCompletion& completion() const { return completion_; }
    const IoRequest& request() const { return request_; }

  private:
    IoRequest request_;
    IoCompletion completion_{.token = request_.token, .begin = Clock::now()};
};

/// Does one request in the calling thread: through the file's mapping, where it has one that
/// reaches so far, else with pread or pwrite. Many threads store into one file at once, where
/// `pwrite` lets in one at a time; and `pread` marks each page as used, which threads wait for each
/// other with.
IoCompletion transfer(const IoRequest& request);

}  // namespace datastates
