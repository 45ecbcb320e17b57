#include "datastates/memory/copy_events.hpp"

namespace datastates {

bool ended(const CopyEvents& events, bool wait) {
    for (const auto& event : events) {
        if (wait && !event->synchronize()) throw cuda::capture_lasts();
        if (!event->passed()) return false;
    }
    return true;
}

}  // namespace datastates
