#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "datastates/base/error.hpp"
#include "datastates/base/timeline.hpp"
#include "datastates/base/unmovable.hpp"
#include "datastates/io/descriptor_file.hpp"

namespace datastates {

enum class IoKind : std::uint8_t { read, write };

/// One transfer between memory and a file. The buffer and the file must outlive its completion.
struct IoRequest {
    IoKind kind;
    File* file;
    std::byte* buffer;
    std::size_t length;
    /// A read that reaches the end of the file needs at least this many bytes (write: `length`).
    std::size_t required;
    std::uint64_t offset;
    /// Returned with the completion.
    std::uint64_t token;
    /// Use the page cache even where direct I/O is possible.
    bool through_cache = false;
    /// See File::give_up.
    std::size_t order = 0;
};

struct IoCompletion {
    std::uint64_t token = 0;
    /// The errno that ended the transfer, or 0.
    int error_number = 0;
    /// The file ended before `required` bytes.
    bool end_of_file = false;
    /// Another error that ended the transfer.
    std::optional<Error> error{};
    std::size_t transferred = 0;
    /// The ring slot or thread that did the transfer, and when.
    std::uint32_t slot = 0;
    Clock::time_point begin{};
    Clock::time_point end{};

    bool ok() const { return error_number == 0 && !end_of_file && !error; }
    void note_end(std::size_t in_slot) {
        slot = static_cast<std::uint32_t>(in_slot);
        end = Clock::now();
    }
};

/// The exception for a completion that is not ok: its error, or "corrupt" for an early end of file,
/// else "io".
Error io_error(const IoCompletion& completion, const IoRequest& request);

/// Moves buffers to and from files, many at a time. It continues short transfers and interrupted
/// ones, and uses the page cache where direct I/O is not possible, until a request is complete or
/// has failed.
///
/// register_memory, submit, reap and in_flight belong to one thread for the object's whole life:
/// the writer's or the reader's. Any thread may call wake. The destructor drops requests that have
/// not begun and waits for the others: no buffer is touched after it.
class IoBackend : Unmovable {
  public:
    virtual ~IoBackend() = default;

    virtual std::string_view name() const = 0;

    /// Registers memory with the kernel, in pieces of `piece_bytes`. Most requests lie within one
    /// piece. Best effort. Call it again when the memory has grown at its end.
    virtual void register_memory(std::span<std::byte> memory, std::size_t piece_bytes) = 0;

    /// Queues a request; requests beyond the queue depth wait inside. Does not wait for I/O, unless
    /// the kernel refuses the transfer and it is done here. If this throws, it has submitted
    /// nothing.
    virtual void submit(const IoRequest& request) = 0;

    /// Returns the completions since the last call. With `wait` and no completion yet, blocks until
    /// there is one, `wake` is called, or nothing is in flight.
    virtual std::vector<IoCompletion> reap(bool wait) = 0;

    /// How many requests were submitted and not yet reaped.
    virtual std::size_t in_flight() const = 0;

    /// Ends a reap that is waiting, or else the next one that would wait. Thread-safe.
    virtual void wake() = 0;
};

/// Makes a backend. `which` is "io_uring", "pwrite" or "auto": io_uring where the kernel and the
/// container's seccomp profile allow it, else pwrite. io_uring runs `queue_depth` transfers at a
/// time, pwrite runs `threads`. Throws Error "invalid" for unusable arguments, and Error "io" where
/// "io_uring" is not available.
std::unique_ptr<IoBackend> make_backend(std::string_view which, unsigned queue_depth,
                                        unsigned threads);

/// The progress of one request to a file with descriptors. It belongs to the thread that does the
/// transfer.
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

    Transfer(const IoRequest& request, DescriptorFile* file) : request_(request), file_(file) {}

    /// Passes the read or write fault point and returns the next syscall to make. `*injected` is
    /// the errno to use instead of making it, or 0.
    Step next(int* injected);
    /// Processes a syscall's result: a byte count or -errno.
    Next advance(ssize_t result, const Step& step);
    const IoCompletion& completion() const { return completion_; }
    const IoRequest& request() const { return request_; }

  private:
    IoRequest request_;
    DescriptorFile* file_;
    IoCompletion completion_{.token = request_.token, .begin = Clock::now()};
};

}  // namespace datastates
