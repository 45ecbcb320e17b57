#include "datastates/base/fault.hpp"

#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <mutex>
#include <string>
#include <thread>

#include "datastates/base/error.hpp"

namespace datastates::fault {
namespace {

enum class Action : std::uint8_t { fail, shorten, eintr, kill, delay };

struct Rule {
    Action action;
    long value;
    std::uint64_t first;      // the first hit that triggers (1-based)
    std::uint64_t remaining;  // triggers left, unless endless
    bool endless;
    std::uint64_t hits = 0;
};

constexpr std::array<std::string_view, 14> kPoints = {
    "open",          "write",       "read",        "sync",        "close",
    "allocate",      "uring_setup", "uring_probe", "uring_enter", "cuda_alloc",
    "cuda_register", "cuda_slab",   "host_read",   "capture"};
constexpr std::array<std::string_view, 5> kActions = {"fail", "short", "eintr", "kill", "delay"};

template <std::size_t N>
std::size_t index_of(const std::array<std::string_view, N>& names, std::string_view name,
                     const char* what) {
    for (std::size_t i = 0; i < N; ++i) {
        if (names.at(i) == name) return i;
    }
    throw Error::invalid(std::string("unknown fault ") + what + ": " + std::string(name));
}

std::mutex mutex;
std::array<std::optional<Rule>, kPoints.size()> rules;
std::atomic<std::uint64_t> clears{0};

/// Sleeps until the time is over, or until the faults are cleared once more than `cleared` times.
void delay(std::chrono::milliseconds time, std::uint64_t cleared) {
    const auto end = std::chrono::steady_clock::now() + time;
    while (clears.load() == cleared && std::chrono::steady_clock::now() < end) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
}

}  // namespace

namespace detail {

std::atomic<bool> armed{false};

std::optional<Outcome> hit_armed(Point point) {
    Rule triggered{};
    std::uint64_t cleared = 0;
    {
        const std::scoped_lock lock(mutex);
        cleared = clears.load();
        auto& slot = rules.at(static_cast<std::size_t>(point));
        if (!slot) return std::nullopt;
        Rule& rule = *slot;
        if (++rule.hits < rule.first) return std::nullopt;
        if (!rule.endless) {
            if (rule.remaining == 0) return std::nullopt;
            --rule.remaining;
        }
        triggered = rule;
    }
    switch (triggered.action) {
        case Action::fail:
            return Outcome{.error_number = static_cast<int>(triggered.value), .shortened = false};
        case Action::shorten:
            return Outcome{.error_number = 0, .shortened = true};
        case Action::eintr:
            return Outcome{.error_number = EINTR, .shortened = false};
        case Action::kill:
            static_cast<void>(std::raise(SIGKILL));
            return std::nullopt;
        case Action::delay:
            delay(std::chrono::milliseconds(triggered.value), cleared);
            return std::nullopt;
    }
    return std::nullopt;
}

}  // namespace detail

void arm(std::string_view point, std::string_view action, long value, std::uint64_t nth,
         std::uint64_t count) {
    const std::size_t slot = index_of(kPoints, point, "point");
    const auto kind = static_cast<Action>(index_of(kActions, action, "action"));
    if (nth == 0) throw Error::invalid("a fault's nth hit counts from 1");
    if (kind == Action::fail && value <= 0) throw Error::invalid("a failing fault needs an errno");
    // Callers retry after EINTR, so endless EINTR would never end. The default is one.
    if (kind == Action::eintr && count == 0) count = 1;
    const std::scoped_lock lock(mutex);
    rules.at(slot) = Rule{
        .action = kind, .value = value, .first = nth, .remaining = count, .endless = count == 0};
    detail::armed.store(true, std::memory_order_relaxed);
}

void clear() {
    const std::scoped_lock lock(mutex);
    rules.fill(std::nullopt);
    detail::armed.store(false, std::memory_order_relaxed);
    ++clears;
}

}  // namespace datastates::fault
