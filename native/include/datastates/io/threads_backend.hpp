#pragma once

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "datastates/io/io_backend.hpp"

namespace datastates {

/// Does transfers in its own threads, as files do them: with pread and pwrite on every kernel and
/// in every container.
class ThreadsBackend final : public IoBackend {
  public:
    explicit ThreadsBackend(unsigned threads);
    ~ThreadsBackend() override;

    std::string_view name() const override { return "pwrite"; }
    void register_memory(std::span<std::byte> /*memory*/, std::size_t /*piece_bytes*/) override {}
    void submit(const IoRequest& request) override;
    std::vector<IoCompletion> reap(bool wait) override;
    std::size_t in_flight() const override { return in_flight_; }
    void wake() override;

  private:
    void work(unsigned thread, const std::stop_token& stop);

    std::mutex mutex_;
    std::condition_variable_any requested_;
    std::condition_variable completed_;
    std::deque<IoRequest> requests_;
    std::vector<IoCompletion> completions_;
    bool woken_ = false;
    std::size_t in_flight_ = 0;  // only for the submitting thread
    std::vector<std::jthread> threads_;
};

}  // namespace datastates
