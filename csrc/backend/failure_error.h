#pragma once

#include <exception>
#include <memory>
#include <utility>

#include <torch/csrc/Exceptions.h>

#include "backend/loss.h"
#include "base/result.h"

namespace mooncake {

// Returns the Python class for the code of a FailureError, as a borrowed reference. Set once,
// before the first group is made.
using PythonClasses = PyObject* (*)(ErrorCode);
void setPythonClasses(PythonClasses classes);

// Exception for kPeerLost, kInputsLost, kEvicted and kMinority. Python sees one of the classes in
// mooncake_backend/errors.py: wherever the exception leaves torch for Python, torch translates a
// PyTorchError into the class that it names. From a future it may also leave through autograd. Its
// text is read on the thread that is handed the exception, so what() tells the loss that this
// thread has seen it.
// With this header a file also compiles pybind11.
class FailureError : public torch::PyTorchError {
 public:
  FailureError(const mooncake::Error& error, std::shared_ptr<Loss> loss)
      : PyTorchError(error.message), code_(error.code), loss_(std::move(loss)) {}

  // Returns a borrowed reference that lasts. The caller holds the interpreter's lock and raises the
  // exception.
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
