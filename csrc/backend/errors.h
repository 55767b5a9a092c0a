#pragma once

#include <exception>
#include <memory>

#include <torch/csrc/Exceptions.h>

#include "backend/loss.h"
#include "base/result.h"

namespace mooncake {

// The border: what torch and Python see of an error of the core. kInvalidArgument becomes
// ValueError, kUnsupported NotImplementedError, everything else torch.distributed.DistBackendError
// (a RuntimeError) or, as a FailureError, a class derived from that.
[[noreturn]] void throwError(const Error& error);
void throwIfError(const Status& status);
std::exception_ptr toException(const Error& error);

std::exception_ptr toException(const std::shared_ptr<Loss>& loss);

// The class of each code of a FailureError, borrowed. Set once, before the first group is made.
using PythonClasses = PyObject* (*)(ErrorCode);
void setPythonClasses(PythonClasses classes);

// kPeerLost, kInputsLost, kEvicted and kMinority: one of the classes in mooncake_backend/errors.py,
// wherever the exception leaves torch's code for Python: torch translates a PyTorchError into the
// class that it names. From a future the exception may also leave through autograd. Its text is
// read where it is handed to a caller, so reading it tells the loss which thread that was.
class FailureError : public torch::PyTorchError {
 public:
  FailureError(const mooncake::Error& error, std::shared_ptr<Loss> loss)
      : PyTorchError(error.message), code_(error.code), loss_(std::move(loss)) {}

  // Borrowed, and lasts. The caller holds the interpreter's lock and raises the exception.
  PyObject* python_type() override;
  const char* what() const noexcept override {
    if (loss_) loss_->noteRaised();
    return PyTorchError::what();
  }

 private:
  ErrorCode code_;
  std::shared_ptr<Loss> loss_;
};

// Copy of the last FailureError that this thread handed to Python; null: none.
std::exception_ptr lastRaisedFailure();

}  // namespace mooncake
