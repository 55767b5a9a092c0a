#pragma once

#include <atomic>
#include <exception>
#include <memory>

#include <c10/util/Exception.h>

#include "base/result.h"

namespace mooncake {

// The border: what torch and Python see of an error of the core. kInvalidArgument becomes
// ValueError, kUnsupported NotImplementedError, everything else torch.distributed.DistBackendError
// (a RuntimeError): as it is, or as a FailureError.
[[noreturn]] void throwError(const Error& error);
void throwIfError(const Status& status);
std::exception_ptr toException(const Error& error);

// A loss that ended an operation in mode `raise`. What its caller had issued until it saw the
// exception ends with it too.
struct Loss {
  explicit Loss(Error why) : error(std::move(why)) {}

  const Error error;
  std::atomic<bool> seen{false};
};
std::exception_ptr toException(const std::shared_ptr<Loss>& loss);

// kPeerLost, kInputsLost, kEvicted and kMinority: a DistBackendError for torch; the bindings make
// mooncake_backend.PeerLostError, EvictedError or MinorityError of it. Out of a future it goes ways
// that we do not see, through autograd say: who reads its text hands it to the caller.
class FailureError : public c10::DistBackendError {
 public:
  FailureError(c10::SourceLocation where, const mooncake::Error& error, std::shared_ptr<Loss> loss)
      : DistBackendError(where, error.message), code_(error.code), loss_(std::move(loss)) {}

  ErrorCode code() const { return code_; }
  const char* what() const noexcept override {
    markSeen();
    return DistBackendError::what();
  }
  const char* what_without_backtrace() const noexcept override {
    markSeen();
    return DistBackendError::what_without_backtrace();
  }

 private:
  void markSeen() const noexcept {
    if (loss_) loss_->seen = true;
  }

  ErrorCode code_;
  std::shared_ptr<Loss> loss_;
};

}  // namespace mooncake
