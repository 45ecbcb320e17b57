#include "datastates/base/thread.hpp"

namespace datastates {

SignalsBlocked::SignalsBlocked() {
    sigset_t signals;
    ::sigfillset(&signals);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS, SIGABRT}) {
        ::sigdelset(&signals, own);
    }
    ::pthread_sigmask(SIG_BLOCK, &signals, &before_);
}

SignalsBlocked::~SignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

}  // namespace datastates
