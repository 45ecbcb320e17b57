#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "datastates/base/unmovable.hpp"

namespace datastates {

/// Threads for work of the processor: checksums, copies in memory, creating files. The executor
/// owns it. It starts a thread only when tasks find no idle one, so an unused pool costs nothing.
/// Thread-safe.
class WorkerPool : Unmovable {
  public:
    /// A call to run once, with the number of its worker (from 0). It must not throw and must not
    /// wait for other tasks. Movable, not copyable.
    class Task {
      public:
        template <typename Call>
        explicit Task(Call call) : body_(std::make_unique<Body<Call>>(std::move(call))) {}
        void operator()(unsigned worker) { body_->run(worker); }

      private:
        struct Callable : Unmovable {
            virtual ~Callable() = default;
            virtual void run(unsigned worker) = 0;
        };
        template <typename Call>
        struct Body final : Callable {
            explicit Body(Call made) : call(std::move(made)) {}
            void run(unsigned worker) override { call(worker); }
            Call call;
        };
        std::unique_ptr<Callable> body_;
    };

    /// One for each core, at most 16: that many saturate the memory on the machines measured.
    static unsigned default_size();

    explicit WorkerPool(unsigned size) : size_(size) { threads_.reserve(size); }
    ~WorkerPool() { close(); }

    unsigned size() const { return size_; }
    /// Queues a task; tasks start in the order of submission. If the system refuses even the first
    /// thread, the task runs in the calling thread.
    void submit(Task task);
    /// Finishes all submitted tasks and joins the workers. REQUIRES: no submit() after it.
    void close();

  private:
    void work(unsigned worker);
    bool grow();

    const unsigned size_;
    std::mutex mutex_;
    std::condition_variable submitted_;
    std::deque<Task> tasks_;
    std::size_t idle_ = 0;
    bool closed_ = false;
    std::vector<std::jthread> threads_;
};

}  // namespace datastates
