#pragma once

namespace datastates {

/// Says that the calling thread, one of ours, works beside the user's: where a core is short, it
/// does not take the core from the thread that has just woken it, which is the one that trains.
void work_in_background();

}  // namespace datastates
