#pragma once

#include <memory>
#include <vector>

#include "datastates/memory/copy_engine.hpp"

namespace datastates {

/// Events behind copies to devices, one for each device.
using CopyEvents = std::vector<std::shared_ptr<Event>>;

/// Whether all copies have ended. With `wait`, waits for that. Throws Error "cuda".
bool ended(const CopyEvents& events, bool wait);

}  // namespace datastates
