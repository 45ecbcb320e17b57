#pragma once

#include <pthread.h>
#include <signal.h>

#include <concepts>
#include <stop_token>
#include <string>
#include <thread>
#include <utility>

#include "datastates/base/unmovable.hpp"

namespace datastates {

/// Blocks signals in the calling thread for a scope. Threads that it starts meanwhile inherit this,
/// so that the program's own threads get the signals. Signals that a thread's own instructions
/// raise, as SIGSEGV, stay unblocked.
class SignalsBlocked : Unmovable {
  public:
    SignalsBlocked();
    ~SignalsBlocked();

  private:
    sigset_t before_{};
};

/// Starts a thread that takes no signals. `name`, of at most 15 bytes, is for debuggers and `top`.
/// Throws std::system_error where the system refuses a thread.
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
