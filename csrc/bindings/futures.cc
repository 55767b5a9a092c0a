#include "bindings/futures.h"

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/jit/python/pybind_utils.h>

#include "backend/batch_work.h"
#include "backend/callbacks.h"
#include "backend/collective_work.h"
#include "backend/completions.h"
#include "backend/device/device_work.h"
#include "backend/errors.h"
#include "backend/failure_error.h"
#include "backend/loss.h"
#include "backend/message_work.h"
#include "base/log.h"

namespace py = pybind11;

namespace mooncake {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using MomentPtr = std::shared_ptr<std::atomic<Callbacks::Moment>>;

// The error that a callback has raised. torch's own future would keep only its text. An error of
// ours keeps its type, so that the program sees a loss where it waits, for example at the end of a
// backward.
std::exception_ptr errorOf(py::error_already_set& raised) try {
  if (const std::exception_ptr failure = lastRaisedFailure()) {
    try {
      std::rethrow_exception(failure);
    } catch (FailureError& error) {
      if (raised.matches(error.python_type()) &&
          py::str(raised.value()).cast<std::string>() == error.what())
        return failure;
    }
  }
  return std::make_exception_ptr(std::runtime_error(
      std::string("Got the following error when running the callback: ") + raised.what()));
} catch (const std::exception& error) {  // the exception's own text cannot be read
  return std::make_exception_ptr(std::runtime_error(
      std::string("a callback raised an error without a text: ") + error.what()));
}

// Runs the callback at once if this thread has the turn, else posts it. Later callbacks in a chain
// belong to the turn of the first.
void runInTurn(const std::shared_ptr<Callbacks>& callbacks, CallbackOrigin origin,
               std::function<void()> run) {
  auto scoped = [origin, run = std::move(run)] {
    const CallbackScope scope(origin);
    run();
  };
  if (callbacks->isCallerInside()) {
    scoped();
  } else {
    callbacks->post(std::move(scoped));
  }
}

// For a future whose value lies on devices: while this lives, the thread has streams of its own
// there, which wait for the value, as torch's callbacks have.
class OnFreshStreams {
 public:
  explicit OnFreshStreams(c10::ivalue::Future& completed) {
    const std::vector<c10::Device>& devices = completed.devices();
    if (devices.empty()) return;
    const c10::impl::VirtualGuardImpl guard(devices[0].type());
    std::vector<c10::Stream> streams;
    for (const c10::Device& device : devices)
      streams.push_back(guard.getStreamFromGlobalPool(device));
    device_.reset_device(devices[0]);
    streams_.emplace(streams);
    completed.wait();
  }

 private:
  c10::OptionalDeviceGuard device_;
  std::optional<c10::MultiStreamGuard> streams_;
};

// A future that runs its callbacks one after the other (see Callbacks), not on the thread that
// completes it. then() returns such a future, too.
//
// The second base makes the conversion to enable_shared_from_this ambiguous: pybind11 would cast
// torch's one dynamically, which a class without virtual functions does not allow.
class PythonFuture final : public torch::jit::PythonFutureWrapper,
                           public std::enable_shared_from_this<PythonFuture> {
 public:
  // `isAtOnce`: the future is complete from the beginning, on all ranks. Then its callbacks run where
  // they are attached, in the order of the program, as callbacks of CUDA's futures do.
  PythonFuture(FuturePtr future, std::shared_ptr<Callbacks> callbacks, CallbackOrigin origin,
               MomentPtr moment, bool isAtOnce)
      : PythonFutureWrapper(std::move(future)),
        callbacks_(std::move(callbacks)),
        origin_(origin),
        moment_(std::move(moment)),
        isAtOnce_(isAtOnce) {}

  // Makes a future that stamps its moment when it is completed.
  static std::shared_ptr<PythonFuture> make(FuturePtr future,
                                            const std::shared_ptr<Callbacks>& callbacks,
                                            CallbackOrigin origin, bool isAtOnce) {
    auto moment = std::make_shared<std::atomic<Callbacks::Moment>>(Callbacks::kNever);
    future->addCallback([callbacks, moment](c10::ivalue::Future&) { callbacks->stamp(*moment); });
    return std::make_shared<PythonFuture>(std::move(future), callbacks, origin, moment, isAtOnce);
  }

  using Pointer = std::shared_ptr<PythonFuture>;

  py::object waitInTurn() {
    {
      py::gil_scoped_release unlocked;
      if (isAtOnce_) {
        fut->wait();
      } else if (callbacks_->isCallerInside()) {
        callbacks_->await(*moment_, Deadline::at(Clock::time_point::max()));
        fut->wait();  // its completion has begun
      } else {
        const Callbacks::Pause pause;
        fut->wait();
      }
    }
    return value();
  }

  static Pointer thenInTurn(const Pointer& self, py::function callback) {
    auto child = self->fut->createInstance(c10::PyObjectType::get());  // of the same devices
    auto result = make(child, self->callbacks_, self->origin_, self->isAtOnce_);
    attach(self, std::move(callback),
           [child](py::function& call, const py::object& self, AttachedCallback& attached) {
             c10::IValue value;
             std::exception_ptr error;
             {
               py::gil_scoped_acquire locked;
               try {
                 value = torch::jit::toIValue(call(self), c10::PyObjectType::get());
               } catch (py::error_already_set& raised) {
                 error = errorOf(raised);
                 raised.restore();
                 PyErr_Clear();
               } catch (const std::exception&) {
                 error = std::current_exception();
               }
             }
             attached.end();  // before the program goes on
             if (error) {
               child->setError(std::move(error));
             } else {
               complete(*child, std::move(value));
             }
           });
    return result;
  }

  static void addDoneCallbackInTurn(const Pointer& self, py::function callback) {
    attach(self, std::move(callback),
           [](py::function& call, const py::object& self, AttachedCallback&) {
             py::gil_scoped_acquire locked;
             try {
               call(self);
             } catch (py::error_already_set& raised) {
               log(LogLevel::kError, "a callback of a future", "raised: ", raised.what());
               raised.restore();
               PyErr_Clear();
             }
           });
  }

 private:
  // torch looks for the tensors in a value that lies on devices, and refuses a value that it cannot
  // take apart, such as a Work.
  static void complete(c10::ivalue::Future& future, c10::IValue value) {
    std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>> storages;
    if (!future.devices().empty() && value.isPyObject()) {
      py::gil_scoped_acquire locked;
      try {
        for (const at::Tensor& tensor : value.toPyObjectHolder()->extractTensors())
          storages.push_back(tensor.storage().getWeakStorageImpl());
      } catch (const std::exception&) {
        PyErr_Clear();
      }
    }
    future.markCompleted(std::move(value), std::move(storages));
  }

  // Called with Python's lock held. `run` is called without it.
  template <typename Run>
  static void attach(const Pointer& self, py::function callback, Run run) {
    auto guarded = std::make_shared<torch::jit::PythonFunctionGuard>(std::move(callback));
    auto attached = std::make_shared<AttachedCallback>(self->origin_);
    py::gil_scoped_release unlocked;
    self->fut->addCallback([callbacks = self->callbacks_, origin = self->origin_, self, guarded,
                            attached, run = std::move(run)](c10::ivalue::Future&) {
      auto call = [self, guarded, attached, run] {
        py::object object;
        {
          py::gil_scoped_acquire locked;
          object = py::cast(self);
        }
        std::exception_ptr failure;
        std::optional<OnFreshStreams> streams;
        try {
          streams.emplace(*self->fut);
        } catch (const std::exception&) {
          // The device's context is lost. The callback meets that error itself.
        }
        try {
          run(guarded->func_, object, *attached);
        } catch (...) {  // the program has set the future that then() returned, for example
          failure = std::current_exception();
        }
        {
          py::gil_scoped_acquire locked;
          object = py::object();
        }
        if (failure) std::rethrow_exception(failure);
      };
      self->isAtOnce_ ? call() : runInTurn(callbacks, origin, std::move(call));
    });
  }

  const std::shared_ptr<Callbacks> callbacks_;
  const CallbackOrigin origin_;
  const MomentPtr moment_;
  const bool isAtOnce_;
};

}  // namespace

py::object futureOf(CollectiveWork& work) {
  auto self = c10::intrusive_ptr<CollectiveWork>::reclaim_copy(&work);
  const MomentPtr moment(&work.endMoment(), [self](auto*) {});
  return py::cast(std::make_shared<PythonFuture>(work.getFuture(), work.completions()->callbacks(),
                                                 work.origin(), moment, false));
}

py::object futureOf(MessageWork& work) {
  return py::cast(PythonFuture::make(work.getFuture(), work.completions()->callbacks(), {}, false));
}

py::object futureOf(BatchWork& work) {
  auto future = work.getFuture();
  const std::shared_ptr<Completions> completions = work.completions();
  if (!completions) return py::cast(std::make_shared<torch::jit::PythonFutureWrapper>(future));
  return py::cast(PythonFuture::make(std::move(future), completions->callbacks(), {}, false));
}

py::object futureOf(DeviceWork& work) {
  auto future = work.getFuture();
  if (auto* collective = dynamic_cast<CollectiveWork*>(work.host().get())) {
    auto self = c10::intrusive_ptr<CollectiveWork>::reclaim_copy(collective);
    const MomentPtr moment(&collective->endMoment(), [self](auto*) {});
    return py::cast(
        std::make_shared<PythonFuture>(std::move(future), collective->completions()->callbacks(),
                                       collective->origin(), moment, work.hasFuturesAtOnce()));
  }
  std::shared_ptr<Completions> completions;
  if (auto* message = dynamic_cast<MessageWork*>(work.host().get()))
    completions = message->completions();
  if (auto* batch = dynamic_cast<BatchWork*>(work.host().get())) completions = batch->completions();
  return py::cast(PythonFuture::make(std::move(future), completions->callbacks(), {}, false));
}

void bindFutures(py::module_& m) {
  py::class_<PythonFuture, torch::jit::PythonFutureWrapper, std::shared_ptr<PythonFuture>>(m,
                                                                                           "Future")
      .def("wait", &PythonFuture::waitInTurn)
      .def("then", &PythonFuture::thenInTurn, py::arg("callback"))
      .def("add_done_callback", &PythonFuture::addDoneCallbackInTurn, py::arg("callback"));
}

}  // namespace mooncake
