#include "datastates/io/uring_backend.hpp"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <memory>
#include <thread>
#include <utility>

#include "datastates/base/fault.hpp"

namespace datastates {
namespace {

// user_data of the poll that waits for wake(). A transfer's user_data is its slot.
constexpr std::uint64_t kWake = ~std::uint64_t{0};
// The kernel's limits: bytes of a registered buffer, and number of registered buffers.
constexpr std::size_t kMaxRegisteredPiece = std::size_t{1} << 30;
constexpr unsigned kMaxRegistered = 1U << 14;
constexpr std::array<int, 5> kOpcodes = {IORING_OP_READ, IORING_OP_WRITE, IORING_OP_READ_FIXED,
                                         IORING_OP_WRITE_FIXED, IORING_OP_POLL_ADD};
// How often to poll for completions where the kernel refuses to wait for them.
constexpr std::chrono::milliseconds kPoll{1};

/// 0 if the kernel supports all opcodes, else an errno. Linux 5.1 to 5.5 read and write registered
/// memory only, and do not support the probe.
int probe(io_uring& ring) {
    if (const int error = fault::hit_error(fault::Point::uring_probe); error != 0) return error;
    const std::unique_ptr<io_uring_probe, decltype(&io_uring_free_probe)> known(
        io_uring_get_probe_ring(&ring), &io_uring_free_probe);
    if (!known) return EINVAL;
    const auto supported = [&](int opcode) {
        return io_uring_opcode_supported(known.get(), opcode) != 0;
    };
    return std::ranges::all_of(kOpcodes, supported) ? 0 : EOPNOTSUPP;
}

}  // namespace

UringBackend::Ring::Ring(unsigned entries) {
    int error = fault::hit_error(fault::Point::uring_setup);
    if (error == 0) error = -io_uring_queue_init(entries, &ring, 0);
    if (error != 0) throw Error::io(error, "io_uring_setup", "");
    error = probe(ring);
    if (error != 0) {
        io_uring_queue_exit(&ring);
        throw Error::io(error, "io_uring_probe", "");
    }
    descriptor = FileDescriptor(ring.ring_fd);
    // The ring's mapping, like its descriptor, would keep the ring in a forked child. Best effort.
    static_cast<void>(io_uring_ring_dontfork(&ring));
}

UringBackend::Ring::~Ring() {
    // Unregister first: another process may hold the ring for a moment, between its fork and exec.
    static_cast<void>(io_uring_unregister_buffers(&ring));
    static_cast<void>(descriptor.release());
    io_uring_queue_exit(&ring);
}

UringBackend::UringBackend(unsigned queue_depth)
    : wake_event_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      slots_(queue_depth),
      ring_(queue_depth + 1) {
    if (!wake_event_.valid()) throw Error::io(errno, "eventfd", "");
    free_slots_.reserve(queue_depth);
    for (std::size_t i = queue_depth; i > 0; --i) free_slots_.push_back(i - 1);
    queued_.reserve(queue_depth + 1);
    if (const int error = push(); error != 0) throw Error::io(error, "io_uring_enter", "");
}

UringBackend::~UringBackend() {
    waiting_.clear();
    // The kernel may still use callers' memory: wait for all transfers.
    while (free_slots_.size() < slots_.size()) static_cast<void>(reap(true));
}

void UringBackend::register_memory(std::span<std::byte> memory, std::size_t piece_bytes) {
    // Kernels before 5.19 refuse this, as does RLIMIT_MEMLOCK. Transfers then work a little slower.
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
    completions_.reserve(in_flight_ + 1);
    waiting_.push_back(request);
    ++in_flight_;
    start_waiting();
    push();
}

void UringBackend::start_waiting() {
    while (!waiting_.empty() && !free_slots_.empty()) {
        const IoRequest request = waiting_.front();
        waiting_.pop_front();
        const std::size_t slot = free_slots_.back();
        free_slots_.pop_back();
        slots_[slot].transfer = Transfer(request, request.file->descriptor());
        if (request.length == 0) {
            finish(slot, slots_[slot].transfer.completion());
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
            finish(index, slot.transfer.completion());
            return;
        }
    }
    io_uring_sqe* const sqe = queue(index);
    prepare(slot, sqe);
    io_uring_sqe_set_data64(sqe, index);
}

/// Returns an entry to prepare. The ring has one for each slot and one for the poll, so one is
/// free.
io_uring_sqe* UringBackend::queue(std::uint64_t user_data) {
    queued_.push_back(user_data);
    return io_uring_get_sqe(&ring_.ring);
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
    // Otherwise this thread's submit call would copy the bytes of a buffered transfer. Let the
    // kernel's workers do it.
    if (!step.direct) io_uring_sqe_set_flags(sqe, IOSQE_ASYNC);
}

void UringBackend::finish(std::size_t index, const IoCompletion& completion) {
    completions_.push_back(completion);
    completions_.back().note_end(index);
    free_slots_.push_back(index);
}

/// Gives the queued entries to the kernel. Entries that it refuses for the moment wait for a later
/// push, if it has other transfers of this ring to complete before. Otherwise this thread does them
/// itself, and push returns the errno of the refusal; else 0.
int UringBackend::push() {
    if (!listening_) {
        io_uring_sqe* const sqe = queue(kWake);
        io_uring_prep_poll_add(sqe, wake_event_.get(), POLLIN);
        io_uring_sqe_set_data64(sqe, kWake);
        listening_ = true;
    }
    while (!queued_.empty()) {
        int result = -fault::hit_error(fault::Point::uring_enter);
        if (result == 0) result = io_uring_submit(&ring_.ring);
        if (result == -EINTR) continue;
        if (result > 0) {
            const auto end = queued_.begin() + result;
            taken_ += static_cast<std::size_t>(result - std::count(queued_.begin(), end, kWake));
            queued_.erase(queued_.begin(), end);
            continue;
        }
        // The kernel is out of memory for requests, or completions must be reaped first.
        const bool for_now = result == 0 || result == -EAGAIN || result == -EBUSY;
        if (for_now && taken_ > 0) return 0;
        do_queued();
        return result == 0 ? EAGAIN : -result;
    }
    return 0;
}

/// Takes back the entries that the kernel has not taken, and does their transfers in this thread.
void UringBackend::do_queued() {
    // The kernel reads entries only in io_uring_enter, which only this thread calls.
    io_uring_sq& sq = ring_.ring.sq;
    sq.sqe_head = sq.sqe_tail = *sq.ktail = *sq.khead;
    for (const std::uint64_t user_data : queued_) {
        if (user_data == kWake) {
            listening_ = false;
        } else {
            const IoRequest& request = slots_[user_data].transfer.request();
            finish(user_data, request.file->transfer(request));
        }
    }
    queued_.clear();
}

void UringBackend::handle(const io_uring_cqe& cqe) {
    if (cqe.user_data == kWake) {
        std::uint64_t value = 0;
        // Fails with EAGAIN only if an earlier poll has drained it.
        static_cast<void>(::read(wake_event_.get(), &value, sizeof value));
        woken_ = true;
        listening_ = false;
        return;
    }
    --taken_;
    const auto index = static_cast<std::size_t>(cqe.user_data);
    Slot& slot = slots_[index];
    if (slot.transfer.advance(cqe.res, slot.step) == Transfer::Next::finished) {
        finish(index, slot.transfer.completion());
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
        // The kernel has the remaining requests.
        int result = -fault::hit_error(fault::Point::uring_enter);
        if (result == 0) result = io_uring_wait_cqe(&ring_.ring, &cqe);
        if (result != 0 && result != -EINTR) std::this_thread::sleep_for(kPoll);
    }
    std::vector<IoCompletion> reaped = completions_;
    completions_.clear();  // keeps the reserved room
    in_flight_ -= reaped.size();
    return reaped;
}

void UringBackend::wake() {
    const std::uint64_t one = 1;
    // Fails only when the counter is full, and then a wake is pending already.
    static_cast<void>(::write(wake_event_.get(), &one, sizeof one));
}

}  // namespace datastates
