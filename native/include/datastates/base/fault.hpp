#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>

/// Named fault points in front of syscalls and driver calls. Tests arm them to simulate a failing
/// machine. An unarmed point costs one relaxed atomic load.
namespace datastates::fault {

enum class Point : std::uint8_t {
    open,
    write,
    read,
    sync,
    close,
    allocate,
    uring_setup,
    uring_probe,
    uring_enter,
    cuda_alloc,
    cuda_register,
    cuda_slab,
    host_read,
    capture,
};

/// What the caller of `hit` must do instead of its call. (Kill and delay happen inside `hit`.)
struct Outcome {
    /// Not 0: report this errno and do not make the call.
    int error_number;
    /// Make the call for about half the bytes, at least one.
    bool shortened;
};

/// Arms `point` with an action: "fail" with errno `value`, "short", "eintr" (fail with EINTR),
/// "kill" (SIGKILL to this process) or "delay" (sleep `value` milliseconds, or until `clear`). It
/// takes effect from the `nth` hit on (1-based), `count` times; 0 means for ever, but once for
/// "eintr". Arming a point again replaces its action. Thread-safe. Throws Error "invalid" for an
/// unknown point or action, for `nth` 0, and for "fail" without an errno.
void arm(std::string_view point, std::string_view action, long value, std::uint64_t nth,
         std::uint64_t count);

/// Disarms every point, and ends the delays under way. Thread-safe.
void clear();

namespace detail {
extern std::atomic<bool> armed;
std::optional<Outcome> hit_armed(Point point);
}  // namespace detail

/// Passes a fault point; empty when the caller is to go on as usual. Thread-safe.
inline std::optional<Outcome> hit(Point point) {
    if (!detail::armed.load(std::memory_order_relaxed)) return std::nullopt;
    return detail::hit_armed(point);
}

/// Passes a fault point where only failures make sense. Returns the errno to report, 0 to go on.
inline int hit_error(Point point) {
    const auto outcome = hit(point);
    return outcome ? outcome->error_number : 0;
}

}  // namespace datastates::fault
