#include "backend/errors.h"

#include <c10/util/Exception.h>

namespace mooncake {

void throwError(const Error& error) {
  switch (error.code) {
    case ErrorCode::kInvalidArgument:
      C10_THROW_ERROR(ValueError, error.message);
    case ErrorCode::kUnsupported:
      C10_THROW_ERROR(NotImplementedError, error.message);
    default:
      C10_THROW_ERROR(DistBackendError, error.message);
  }
}

void throwIfError(const Status& status) {
  if (!status.ok()) throwError(status.error());
}

std::exception_ptr toException(const Error& error) {
  try {
    throwError(error);
  } catch (...) {
    return std::current_exception();
  }
}

}  // namespace mooncake
