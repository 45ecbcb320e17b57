#include "datastates/base/background.hpp"

#include <pthread.h>
#include <sched.h>

#include <thread>

namespace datastates {

void work_in_background() {
    if (std::thread::hardware_concurrency() > kFewCores) return;
    sched_param parameters{};
    int policy = 0;
    // Any other policy is the user's choice and stays.
    if (::pthread_getschedparam(::pthread_self(), &policy, &parameters) != 0) return;
    if (policy != SCHED_OTHER) return;
    // If this is forbidden, everything works, but the training thread may wait longer.
    static_cast<void>(::pthread_setschedparam(::pthread_self(), SCHED_BATCH, &parameters));
}

}  // namespace datastates
