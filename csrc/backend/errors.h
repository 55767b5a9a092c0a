#pragma once

#include <exception>
#include <memory>

#include "backend/loss.h"
#include "base/result.h"

namespace mooncake {

// Translates errors of the core into exceptions of torch and Python. kInvalidArgument becomes
// ValueError, kUnsupported NotImplementedError. All other errors become torch.distributed's
// DistBackendError (a RuntimeError) or, as a FailureError, a class derived from that.
[[noreturn]] void throwError(const Error& error);
void throwIfError(const Status& status);
std::exception_ptr toException(const Error& error);

std::exception_ptr toException(const std::shared_ptr<Loss>& loss);

// Whether Python code raised it, such as a signal's handler that ran in a wait.
bool isOfPython(const std::exception_ptr& exception);

}  // namespace mooncake
