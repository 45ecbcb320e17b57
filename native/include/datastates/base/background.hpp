#pragma once

namespace datastates {

/// On at most this many cores, two of our working threads leave too little for the training.
constexpr unsigned kFewCores = 4;

/// Marks the calling thread as a background thread, by SCHED_BATCH. On a machine of few cores it
/// then does not preempt the training thread that wakes it. On more than kFewCores cores this does
/// nothing: another core is free, or all of them work for us and the thread would run too late. The
/// two threads that own the backends do not call it, because the storage waits for them.
void work_in_background();

}  // namespace datastates
