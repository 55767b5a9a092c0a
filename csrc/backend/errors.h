#pragma once

#include <exception>

#include "base/result.h"

namespace mooncake {

// The border: what torch and Python see of an error of the core. kInvalidArgument becomes
// ValueError, kUnsupported NotImplementedError, everything else torch.distributed.DistBackendError
// (a RuntimeError).
[[noreturn]] void throwError(const Error& error);
void throwIfError(const Status& status);
std::exception_ptr toException(const Error& error);

}  // namespace mooncake
