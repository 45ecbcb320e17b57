#include "datastates/base/background.hpp"

#include <pthread.h>
#include <sched.h>

#include <thread>

namespace datastates {

void work_in_background() {
    if (std::thread::hardware_concurrency() > kFewCores) return;
    sched_param parameters{};
    int policy = 0;
    // Another policy is the user's choice for all threads of the process.
    if (::pthread_getschedparam(::pthread_self(), &policy, &parameters) != 0) return;
    if (policy != SCHED_OTHER) return;
    // Where it is forbidden all works, only that thread waits longer.
    static_cast<void>(::pthread_setschedparam(::pthread_self(), SCHED_BATCH, &parameters));
}

}  // namespace datastates
