#include "backend/errors.h"

#include <c10/util/Exception.h>

#include "backend/failure_error.h"

namespace mooncake {
namespace {

template <typename Throw>
std::exception_ptr caught(Throw&& thrower) {
  try {
    thrower();
  } catch (...) {
    return std::current_exception();
  }
  return nullptr;
}

}  // namespace

void throwError(const Error& error) {
  switch (error.code) {
    case ErrorCode::kInvalidArgument:
      C10_THROW_ERROR(ValueError, error.message);
    case ErrorCode::kUnsupported:
      C10_THROW_ERROR(NotImplementedError, error.message);
    case ErrorCode::kPeerLost:
    case ErrorCode::kInputsLost:
    case ErrorCode::kEvicted:
    case ErrorCode::kMinority:
      throw FailureError(error, nullptr);
    default:
      C10_THROW_ERROR(DistBackendError, error.message);
  }
}

void throwIfError(const Status& status) {
  if (!status.ok()) throwError(status.error());
}

std::exception_ptr toException(const Error& error) {
  return caught([&] { throwError(error); });
}

std::exception_ptr toException(const std::shared_ptr<Loss>& loss) {
  return caught([&] { throw FailureError(loss->error(), loss); });
}

bool isOfPython(const std::exception_ptr& exception) {
  try {
    std::rethrow_exception(exception);
  } catch (const python_error&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace mooncake
