#pragma once

#include <optional>
#include <string>
#include <utility>
#include <variant>

namespace mooncake {

// How an operation of the core ended. The C++ side speaks in Status and Result; the border to torch
// (backend/errors.h) is the only place that turns them into exceptions.
enum class ErrorCode {
  kOk = 0,
  kInvalidArgument,  // the caller's mistake; nothing was sent
  kMismatch,         // ranks called different operations
  kTimeout,          // the deadline passed
  kAborted,          // abort() or destroy() while waiting
  kPeerLost,         // a peer is gone or cannot be reached
  kRefused,          // a peer (or we) refused: wrong key, wrong job, outside a registered region
  kUnsupported,      // this machine or build cannot do it
  kExhausted,        // out of memory, descriptors or slots
  kSystem,           // a system call failed
  kProtocol,         // a peer sent bytes that do not decode
  kInterrupted,      // this attempt is over; the flush decides how the operation goes on
  kInputsLost,       // like kPeerLost, but the operation has already overwritten its input
  kEvicted,          // the other ranks go on without this one, for good
  kMinority,         // too few are left on this side of a partition to go on
  kMoved,            // the group's series is closed: the call runs again in the successor
};
constexpr ErrorCode kLastErrorCode = ErrorCode::kMoved;

const char* errorCodeName(ErrorCode code);

struct Error {
  ErrorCode code = ErrorCode::kOk;
  std::string message;  // names rank, peer, operation, cause and remedy, as far as each is known
};

// Cheap when ok: one flag, nothing allocated.
class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(Error error) : error_(std::make_optional(std::move(error))) {}
  Status(ErrorCode code, std::string message) : Status(Error{code, std::move(message)}) {}

  bool ok() const { return !error_; }
  ErrorCode code() const { return error_ ? error_->code : ErrorCode::kOk; }
  const Error& error() const { return *error_; }

 private:
  std::optional<Error> error_;
};

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Error error) : value_(std::move(error)) {}
  Result(const Status& failed) : value_(failed.error()) {}  // `failed` must not be ok
  Result(ErrorCode code, std::string message) : value_(Error{code, std::move(message)}) {}

  bool ok() const { return value_.index() == 0; }
  const Error& error() const { return std::get<1>(value_); }
  Status status() const { return ok() ? Status() : Status(error()); }
  T& operator*() { return std::get<0>(value_); }
  const T& operator*() const { return std::get<0>(value_); }
  T* operator->() { return &std::get<0>(value_); }
  const T* operator->() const { return &std::get<0>(value_); }

 private:
  std::variant<T, Error> value_;
};

// Returns kSystem with the call's name and errno's text: "connect(10.0.0.1:4711): Connection
// refused". Returns kExhausted if descriptors ran out.
Error systemError(const std::string& call, int errnoValue);

}  // namespace mooncake

// Returns an error to the caller. The only macro of the core.
#define MOONCAKE_TRY(expr)                                                                    \
  do {                                                                                        \
    if (auto mooncakeStatus_ = (expr); !mooncakeStatus_.ok()) return mooncakeStatus_.error(); \
  } while (false)
