#include "backend/failure_error.h"

namespace mooncake {
namespace {

PythonClasses pythonClasses = nullptr;
thread_local std::exception_ptr lastRaised;

}  // namespace

void setPythonClasses(PythonClasses classes) { pythonClasses = classes; }

PyObject* FailureError::python_type() {
  lastRaised = std::make_exception_ptr(FailureError(*this));
  return pythonClasses(code_);
}

std::exception_ptr lastRaisedFailure() { return lastRaised; }

}  // namespace mooncake
