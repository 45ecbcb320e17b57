#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <string_view>

/// Named fault points beside the syscalls that they break, for tests of what a failing machine
/// does. An unarmed point costs one relaxed atomic load.
namespace datastates::fault {

enum class Point : std::uint8_t {
    open,
    write,
    read,
    sync,
    truncate,
    allocate,
    statfs,
    uring_setup,
    uring_probe,
    uring_enter,
    cuda_alloc,
    cuda_register,
    cuda_slab,
    host_read,
    capture,
};

/// What the caller of `hit` must do in place of its syscall. (Kill and delay happen inside `hit`.)
struct Outcome {
    /// Not 0: report this errno and do not make the call.
    int error_number;
    /// Make the call for about half the bytes, at least one.
    bool shortened;
};

/// Arms `point`: "fail" with errno `value`, "short", "eintr" (one EINTR), "kill" (SIGKILL to this
/// process) or "delay" (sleep `value` milliseconds). Takes effect from the `nth` hit on (1-based),
/// `count` times (0: for ever). Arming a point again replaces what was there. Thread-safe.
/// Throws Error "invalid" for an unknown point or action.
void arm(std::string_view point, std::string_view action, long value, std::uint64_t nth,
         std::uint64_t count);

/// Disarms every point. Thread-safe.
void clear();

namespace detail {
extern std::atomic<bool> armed;
std::optional<Outcome> hit_armed(Point point);
}  // namespace detail

/// Passes a fault point. Thread-safe.
inline std::optional<Outcome> hit(Point point) {
    if (!detail::armed.load(std::memory_order_relaxed)) return std::nullopt;
    return detail::hit_armed(point);
}

/// Passes a point where only failures make sense: the errno to report, 0 to go on.
inline int hit_error(Point point) {
    const auto outcome = hit(point);
    return outcome ? outcome->error_number : 0;
}

}  // namespace datastates::fault
