#pragma once

#include <atomic>
#include <exception>
#include <memory>

#include <torch/csrc/Exceptions.h>

#include "base/result.h"

namespace mooncake {

// The border: what torch and Python see of an error of the core. kInvalidArgument becomes
// ValueError, kUnsupported NotImplementedError, everything else torch.distributed.DistBackendError
// (a RuntimeError) or, as a FailureError, a class derived from that.
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

// The class of each code of a FailureError, borrowed. Set once, before the first group is made.
using PythonClasses = PyObject* (*)(ErrorCode);
void setPythonClasses(PythonClasses classes);

// kPeerLost, kInputsLost, kEvicted and kMinority: one of the classes in mooncake_backend/errors.py,
// wherever it leaves torch's code for Python: PyTorchError is what torch translates into a class
// that the thrower names. Out of a future it goes ways that we do not see, through autograd say:
// who reads its text hands it to the caller.
class FailureError : public torch::PyTorchError {
 public:
  FailureError(const mooncake::Error& error, std::shared_ptr<Loss> loss)
      : PyTorchError(error.message), code_(error.code), loss_(std::move(loss)) {}

  // Borrowed, and lasts. Who is about to raise it holds the interpreter's lock.
  PyObject* python_type() override;
  const char* what() const noexcept override {
    if (loss_) loss_->seen = true;
    return PyTorchError::what();
  }

 private:
  ErrorCode code_;
  std::shared_ptr<Loss> loss_;
};

}  // namespace mooncake
