#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

namespace datastates {

/// The kind of an error. Callers branch on this, never on the message.
enum class ErrorCode : std::uint8_t { io, cuda, corrupt, invalid, cancelled, closed };

std::string_view to_string(ErrorCode code);

/// The only exception type that this library defines. Immutable; copies share the details. A job
/// keeps the error that stopped it and throws it again to every waiter.
class Error : public std::exception {
  public:
    /// `error_number` is an errno (0: none), `op` the operation that failed, `path` the file or "".
    /// `record` is the number of the damaged record (-1: none).
    Error(ErrorCode code, int error_number, std::string op, std::string path, std::string message,
          int record = -1);

    /// An "io" error whose message is made of the operation, the path and the errno.
    static Error io(int error_number, std::string op, std::string path);
    static Error invalid(std::string message);
    static Error closed(std::string message);
    static Error cancelled();
    /// Converts the exception being handled, whatever its type. Works without free memory: it then
    /// returns a prepared ENOMEM error.
    static Error current() noexcept;

    const char* what() const noexcept override { return details_->message.c_str(); }
    ErrorCode code() const { return details_->code; }
    int error_number() const { return details_->error_number; }
    const std::string& op() const { return details_->op; }
    const std::string& path() const { return details_->path; }
    int record() const { return details_->record; }

  private:
    struct Details {
        ErrorCode code;
        int error_number;
        int record;
        std::string op;
        std::string path;
        std::string message;
    };
    std::shared_ptr<const Details> details_;
};

}  // namespace datastates
