#include "datastates/io/io_backend.hpp"

#include <algorithm>
#include <cerrno>
#include <string>
#include <thread>

#include "datastates/base/fault.hpp"
#include "datastates/io/threads_backend.hpp"
#include "datastates/io/uring_backend.hpp"

namespace datastates {
namespace {

// The kernel moves at most 2 GiB - 4 KiB at a time. Steps of 1 GiB keep the next offset aligned.
constexpr std::size_t kMaxStep = std::size_t{1} << 30;

}  // namespace

Error io_error(const IoCompletion& completion, const IoRequest& request) {
    const char* op = request.kind == IoKind::read ? "read" : "write";
    const std::string& path = request.file->path();
    if (completion.error) return *completion.error;
    if (completion.end_of_file) {
        return {ErrorCode::corrupt, 0, op, path,
                "file " + path + " ends at byte " +
                    std::to_string(request.offset + completion.transferred) + ", expected " +
                    std::to_string(request.required) + " bytes at offset " +
                    std::to_string(request.offset)};
    }
    return Error::io(completion.error_number, op, path);
}

Transfer::Step Transfer::next(int* injected) {
    const std::size_t done = completion_.transferred;
    Step step{.fd = -1,
              .direct = false,
              .buffer = request_.buffer + done,
              .length = std::min(request_.length - done, kMaxStep),
              .offset = request_.offset + done};
    const auto point = request_.kind == IoKind::read ? fault::Point::read : fault::Point::write;
    *injected = 0;
    if (const auto outcome = fault::hit(point)) {
        *injected = outcome->error_number;
        if (outcome->shortened) step.length = std::max<std::size_t>(step.length / 2, 1);
    }
    step.direct =
        !request_.through_cache && file_->fits_direct(step.buffer, step.length, step.offset);
    step.fd = step.direct ? file_->direct_fd() : file_->buffered_fd();
    return step;
}

Transfer::Next Transfer::advance(ssize_t result, const Step& step) {
    if (result > 0) {
        completion_.transferred += static_cast<std::size_t>(result);
        return completion_.transferred < request_.length ? Next::again : Next::finished;
    }
    if (result == 0) {
        // A write that writes nothing would repeat for ever.
        if (request_.kind == IoKind::write) completion_.error_number = EIO;
        completion_.end_of_file =
            request_.kind == IoKind::read && completion_.transferred < request_.required;
        return Next::finished;
    }
    const auto error = static_cast<int>(-result);
    if (error == EINTR) return Next::again;
    if (error == EAGAIN) {
        std::this_thread::yield();
        return Next::again;
    }
    // Direct I/O is only a faster way: whatever refuses it, the page cache may take the transfer.
    // A failing or full device would fail that, too, and not always at once.
    if (step.direct && error != EIO && error != ENOSPC && error != EDQUOT) {
        file_->drop_direct();
        return Next::again;
    }
    completion_.error_number = error;
    return Next::finished;
}

std::unique_ptr<IoBackend> make_backend(std::string_view which, unsigned queue_depth,
                                        unsigned threads) {
    if (queue_depth == 0 || queue_depth > 4096) {
        throw Error::invalid("the queue depth must be between 1 and 4096");
    }
    if (threads == 0 || threads > 1024) {
        throw Error::invalid("the number of I/O threads must be between 1 and 1024");
    }
    if (which != "auto" && which != "io_uring" && which != "pwrite") {
        throw Error::invalid("unknown I/O backend: " + std::string(which));
    }
    if (which != "pwrite") {
        try {
            return std::make_unique<UringBackend>(queue_depth);
        } catch (const Error&) {
            // io_uring is missing, forbidden by seccomp or out of locked memory. pwrite always
            // works.
            if (which == "io_uring") throw;
        }
    }
    return std::make_unique<ThreadsBackend>(threads);
}

}  // namespace datastates
