#include "datastates/base/error.hpp"

#include <cerrno>
#include <new>
#include <system_error>
#include <utility>

namespace datastates {
namespace {

// Made at the start, while there is memory for it. Without memory at the start nothing runs.
// NOLINTNEXTLINE(bugprone-throwing-static-initialization)
const Error kOutOfMemory = []() noexcept { return Error::io(ENOMEM, "allocate memory", ""); }();

Error described() {
    try {
        throw;
    } catch (const Error& error) {
        return error;
    } catch (const std::bad_alloc&) {
        return kOutOfMemory;
    } catch (const std::exception& error) {
        return {ErrorCode::io, 0, "run", "", error.what()};
    } catch (...) {
        return {ErrorCode::io, 0, "run", "", "unknown exception type"};
    }
}

}  // namespace

std::string_view to_string(ErrorCode code) {
    switch (code) {
        case ErrorCode::io:
            return "io";
        case ErrorCode::cuda:
            return "cuda";
        case ErrorCode::corrupt:
            return "corrupt";
        case ErrorCode::invalid:
            return "invalid";
        case ErrorCode::cancelled:
            return "cancelled";
        case ErrorCode::closed:
            return "closed";
    }
    return "invalid";
}

Error::Error(ErrorCode code, int error_number, std::string op, std::string path,
             std::string message, int record)
    : details_(std::make_shared<const Details>(Details{.code = code,
                                                       .error_number = error_number,
                                                       .record = record,
                                                       .op = std::move(op),
                                                       .path = std::move(path),
                                                       .message = std::move(message)})) {}

Error Error::io(int error_number, std::string op, std::string path) {
    std::string message = op + " failed";
    if (!path.empty()) message += " on " + path;
    message += ": " + std::generic_category().message(error_number) + " (errno " +
               std::to_string(error_number) + ")";
    return {ErrorCode::io, error_number, std::move(op), std::move(path), std::move(message)};
}

Error Error::invalid(std::string message) {
    return {ErrorCode::invalid, 0, "validate", "", std::move(message)};
}

Error Error::closed(std::string message) {
    return {ErrorCode::closed, 0, "submit", "", std::move(message)};
}

Error Error::cancelled() { return {ErrorCode::cancelled, 0, "abort", "", "the job was aborted"}; }

Error Error::current() noexcept {
    try {
        return described();
    } catch (...) {
        return kOutOfMemory;
    }
}

}  // namespace datastates
