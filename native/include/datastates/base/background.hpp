#pragma once

namespace datastates {

/// Up to so many cores one is short whenever two of our threads work.
constexpr unsigned kFewCores = 4;

/// Says that the calling thread, one of ours, works beside the user's: where cores are few, it does
/// not take the core from the thread that has just woken it, which is the one that trains. Where
/// they are many, it does nothing: there is another core for it, unless all of them work for us,
/// and then it would be woken too late. Not for the two threads that own
/// the backends, as the storage waits for them.
void work_in_background();

}  // namespace datastates
