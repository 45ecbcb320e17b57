#include "datastates/uring_backend.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <utility>

#include "datastates/fault.hpp"

namespace datastates {
namespace {

// user_data of the poll that listens for wake(); slots count from 0.
constexpr std::uint64_t kWake = ~std::uint64_t{0};
// The kernel registers at most this much as one buffer, and so many buffers.
constexpr std::size_t kMaxRegisteredPiece = std::size_t{1} << 30;
constexpr unsigned kMaxRegistered = 1U << 14;

}  // namespace

UringBackend::Ring::Ring(unsigned entries) {
    int error = fault::hit_error(fault::Point::uring_setup);
    if (error == 0) error = -io_uring_queue_init(entries, &ring, 0);
    if (error != 0) throw Error::io(error, "io_uring_setup", "");
}

UringBackend::UringBackend(unsigned queue_depth)
    : wake_event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      slots_(queue_depth),
      ring_(queue_depth + 1) {
    if (!wake_event_.valid()) throw Error::io(errno, "eventfd", "");
    free_slots_.reserve(queue_depth);
    for (std::size_t i = queue_depth; i > 0; --i) free_slots_.push_back(i - 1);
    arm_wake();
}

UringBackend::~UringBackend() {
    waiting_.clear();
    // The kernel may still write into callers' memory: wait until it does not.
    while (free_slots_.size() < slots_.size()) {
        try {
            push();
            static_cast<void>(reap(true));
            waiting_.clear();
        } catch (const Error&) {
            std::this_thread::yield();
        }
    }
}

void UringBackend::register_memory(std::span<std::byte> memory, std::size_t piece_bytes) {
    // Refused by kernels before 5.19, and for RLIMIT_MEMLOCK: transfers work without, a little
    // slower.
    if (refused_) return;
    if (piece_bytes_ == 0) {
        piece_bytes_ = piece_bytes;
        refused_ = piece_bytes > kMaxRegisteredPiece ||
                   io_uring_register_buffers_sparse(&ring_.ring, kMaxRegistered) != 0;
    }
    while (!refused_ && registered_.size() < memory.size()) {
        const std::size_t at = registered_.size();
        const iovec piece{.iov_base = memory.data() + at,
                          .iov_len = std::min(piece_bytes, memory.size() - at)};
        const auto index = static_cast<unsigned>(at / piece_bytes);
        refused_ = index == kMaxRegistered || io_uring_register_buffers_update_tag(
                                                  &ring_.ring, index, &piece, nullptr, 1) != 1;
        if (!refused_) registered_ = memory.first(at + piece.iov_len);
    }
}

int UringBackend::registered_index(const std::byte* buffer, std::size_t length) const {
    if (registered_.empty() || buffer < registered_.data()) return -1;
    const auto begin = static_cast<std::size_t>(buffer - registered_.data());
    if (begin >= registered_.size() || length > registered_.size() - begin) return -1;
    const std::size_t piece = begin / piece_bytes_;
    if ((begin + length - 1) / piece_bytes_ != piece) return -1;
    return static_cast<int>(piece);
}

void UringBackend::submit(const IoRequest& request) {
    ++in_flight_;
    waiting_.push_back(request);
    start_waiting();
    push();
}

void UringBackend::start_waiting() {
    while (!waiting_.empty() && !free_slots_.empty()) {
        const IoRequest request = waiting_.front();
        waiting_.pop_front();
        const std::size_t slot = free_slots_.back();
        free_slots_.pop_back();
        slots_[slot].transfer = Transfer(request);
        if (request.length == 0) {
            finish(slot);
        } else {
            start(slot);
        }
    }
}

void UringBackend::start(std::size_t index) {
    Slot& slot = slots_[index];
    for (;;) {
        int injected = 0;
        slot.step = slot.transfer.next(&injected);
        if (injected == 0) break;
        if (slot.transfer.advance(-injected, slot.step) == Transfer::Next::finished) {
            finish(index);
            return;
        }
    }
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_.ring);
    while (sqe == nullptr) {  // every entry is queued and not yet taken by the kernel
        push();
        sqe = io_uring_get_sqe(&ring_.ring);
    }
    prepare(slot, sqe);
    io_uring_sqe_set_data64(sqe, index);
}

void UringBackend::prepare(const Slot& slot, io_uring_sqe* sqe) const {
    const Transfer::Step& step = slot.step;
    const auto length = static_cast<unsigned>(step.length);
    const int registered = registered_index(step.buffer, step.length);
    if (slot.transfer.request().kind == IoKind::write) {
        if (registered >= 0) {
            io_uring_prep_write_fixed(sqe, step.fd, step.buffer, length, step.offset, registered);
        } else {
            io_uring_prep_write(sqe, step.fd, step.buffer, length, step.offset);
        }
    } else if (registered >= 0) {
        io_uring_prep_read_fixed(sqe, step.fd, step.buffer, length, step.offset, registered);
    } else {
        io_uring_prep_read(sqe, step.fd, step.buffer, length, step.offset);
    }
    // A buffered transfer would be copied inside this thread's submit call; the kernel's workers
    // do it beside us.
    if (!step.direct) io_uring_sqe_set_flags(sqe, IOSQE_ASYNC);
}

void UringBackend::finish(std::size_t index) {
    completions_.push_back(slots_[index].transfer.completion());
    completions_.back().note_end(index);
    free_slots_.push_back(index);
}

void UringBackend::arm_wake() {
    io_uring_sqe* sqe = io_uring_get_sqe(&ring_.ring);
    while (sqe == nullptr) {
        push();
        sqe = io_uring_get_sqe(&ring_.ring);
    }
    io_uring_prep_poll_add(sqe, wake_event_.get(), POLLIN);
    io_uring_sqe_set_data64(sqe, kWake);
    push();
}

void UringBackend::push() {
    while (io_uring_sq_ready(&ring_.ring) > 0) {
        const int result = io_uring_submit(&ring_.ring);
        if (result > 0 || result == -EINTR) continue;
        // Out of request memory, or completions to be taken first: entries stay queued and go out
        // with a later push.
        if (result == 0 || result == -EAGAIN || result == -EBUSY) return;
        throw Error::io(-result, "io_uring_submit", "");
    }
}

void UringBackend::handle(const io_uring_cqe& cqe) {
    if (cqe.user_data == kWake) {
        std::uint64_t value = 0;
        // Empty (EAGAIN) only if an earlier poll already drained it.
        static_cast<void>(::read(wake_event_.get(), &value, sizeof value));
        woken_ = true;
        arm_wake();
        return;
    }
    const auto index = static_cast<std::size_t>(cqe.user_data);
    Slot& slot = slots_[index];
    if (slot.transfer.advance(cqe.res, slot.step) == Transfer::Next::finished) {
        finish(index);
    } else {
        start(index);
    }
}

std::vector<IoCompletion> UringBackend::reap(bool wait) {
    for (;;) {
        io_uring_cqe* cqe = nullptr;
        while (io_uring_peek_cqe(&ring_.ring, &cqe) == 0) {
            const io_uring_cqe taken = *cqe;
            io_uring_cqe_seen(&ring_.ring, cqe);
            handle(taken);
        }
        start_waiting();
        push();
        const bool woken = std::exchange(woken_, false);
        if (!completions_.empty() || !wait || woken || in_flight_ == 0) break;
        const int result = io_uring_wait_cqe(&ring_.ring, &cqe);
        if (result != 0 && result != -EINTR && result != -EAGAIN) {
            throw Error::io(-result, "io_uring_wait", "");
        }
    }
    in_flight_ -= completions_.size();
    return std::exchange(completions_, {});
}

void UringBackend::wake() {
    const std::uint64_t one = 1;
    // Fails only when the counter is full, and then the reader is woken already.
    static_cast<void>(::write(wake_event_.get(), &one, sizeof one));
}

}  // namespace datastates
