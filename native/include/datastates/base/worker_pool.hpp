#pragma once

#include <condition_variable>
#include <cstddef>
#include <deque>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace datastates {

/// Threads for work that any core can do: checksums, and copies in memory. They are made when there
/// is more work than there are, so that an idle pool costs nothing. Thread-safe.
class WorkerPool {
  public:
    /// Called with the number of the worker that runs it, from 0. It must not throw, and must not
    /// wait for other tasks. Movable, not copyable.
    class Task {
      public:
        template <typename Call>
        explicit Task(Call call) : body_(std::make_unique<Body<Call>>(std::move(call))) {}
        void operator()(unsigned worker) { body_->run(worker); }

      private:
        struct Callable {
            Callable() = default;
            Callable(const Callable&) = delete;
            Callable& operator=(const Callable&) = delete;
            Callable(Callable&&) = delete;
            Callable& operator=(Callable&&) = delete;
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

    /// One a core, up to 16: that many copy faster than memory allows on the machines measured.
    static unsigned default_size();

    explicit WorkerPool(unsigned size) : size_(size) { threads_.reserve(size); }
    ~WorkerPool() { close(); }
    WorkerPool(const WorkerPool&) = delete;
    WorkerPool& operator=(const WorkerPool&) = delete;
    WorkerPool(WorkerPool&&) = delete;
    WorkerPool& operator=(WorkerPool&&) = delete;

    unsigned size() const { return size_; }
    /// Tasks start in this order. Where the system gives us no thread at all, the task is run here.
    void submit(Task task);
    /// Runs what was submitted, and ends the workers. REQUIRES: nothing is submitted after it.
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
