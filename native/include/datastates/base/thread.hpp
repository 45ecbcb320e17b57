#pragma once

#include <pthread.h>
#include <signal.h>

#include <concepts>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

namespace datastates {

/// Blocks signals in this thread, and in those that it makes, for a scope: they are for the
/// program's own threads. Not those that a thread's own instructions raise.
class SignalsBlocked {
  public:
    SignalsBlocked();
    ~SignalsBlocked();
    SignalsBlocked(const SignalsBlocked&) = delete;
    SignalsBlocked& operator=(const SignalsBlocked&) = delete;
    SignalsBlocked(SignalsBlocked&&) = delete;
    SignalsBlocked& operator=(SignalsBlocked&&) = delete;

  private:
    sigset_t before_{};
};

/// A thread that takes no signals, with a name for debuggers and `top`: of at most 15 bytes.
/// Throws std::system_error where the system refuses one.
template <typename Body>
std::jthread start_thread(std::string name, Body body) {
    const SignalsBlocked blocked;
    return std::jthread(
        [name = std::move(name), body = std::move(body)](const std::stop_token& stop) {
            ::pthread_setname_np(::pthread_self(), name.c_str());
            if constexpr (std::invocable<const Body&, const std::stop_token&>) {
                body(stop);
            } else {
                body();
            }
        });
}

}  // namespace datastates
