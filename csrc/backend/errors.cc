#include "backend/errors.h"

#include <utility>

namespace mooncake {
namespace {

PythonClasses pythonClasses = nullptr;
thread_local std::exception_ptr lastRaised;

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

void setPythonClasses(PythonClasses classes) { pythonClasses = classes; }

PyObject* FailureError::python_type() {
  lastRaised = std::make_exception_ptr(FailureError(*this));
  return pythonClasses(code_);
}

std::exception_ptr lastRaisedFailure() { return lastRaised; }

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

}  // namespace mooncake
