#pragma once

#include <liburing.h>

#include <deque>
#include <vector>

#include "datastates/base/unmovable.hpp"
#include "datastates/io/io_backend.hpp"

namespace datastates {

/// io_uring through liburing. The submitting thread itself does the transfers that the kernel
/// refuses to take.
class UringBackend final : public IoBackend {
  public:
    /// Throws Error "io" (op "io_uring_setup", "io_uring_probe", "io_uring_enter" or "eventfd")
    /// when the kernel refuses io_uring, or its io_uring lacks an operation that we need.
    explicit UringBackend(unsigned queue_depth);
    ~UringBackend() override;

    std::string_view name() const override { return "io_uring"; }
    void register_memory(std::span<std::byte> memory, std::size_t piece_bytes) override;
    void submit(const IoRequest& request) override;
    std::vector<IoCompletion> reap(bool wait) override;
    std::size_t in_flight() const override { return in_flight_; }
    void wake() override;

  private:
    struct Ring : datastates::Unmovable {
        explicit Ring(unsigned entries);
        ~Ring();
        io_uring ring{};
        FileDescriptor descriptor;  // the ring's own
    };
    struct Slot {
        Transfer transfer{IoRequest{}, nullptr};
        Transfer::Step step{};
    };

    void start(std::size_t slot);
    void finish(std::size_t slot, const IoCompletion& completion);
    void start_waiting();
    io_uring_sqe* queue(std::uint64_t user_data);
    void prepare(const Slot& slot, io_uring_sqe* sqe) const;
    int push();
    void do_queued();
    void handle(const io_uring_cqe& cqe);
    int registered_index(const std::byte* buffer, std::size_t length) const;

    FileDescriptor wake_event_;
    std::vector<Slot> slots_;
    std::vector<std::size_t> free_slots_;
    std::deque<IoRequest> waiting_;  // beyond the queue depth
    std::vector<IoCompletion> completions_;
    std::span<std::byte> registered_;
    std::size_t piece_bytes_ = 0;  // 0: register_memory was not called yet
    bool refused_ = false;
    std::size_t in_flight_ = 0;
    bool woken_ = false;
    std::vector<std::uint64_t> queued_;  // entries that the kernel has not taken yet
    std::size_t taken_ = 0;              // transfers that the kernel is doing
    bool listening_ = false;             // the poll on wake_event_ is queued or active
    Ring ring_;                          // last: destroyed first
};

}  // namespace datastates
