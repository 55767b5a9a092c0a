#pragma once

#include <memory>

#include "backend/device/staging.h"
#include "ep/buffer.h"

namespace mooncake {

// A dispatch or combine that was submitted.
class EpWork {
 public:
  // `staging`: null for a call with CPU tensors.
  EpWork(std::shared_ptr<ep::Buffer> buffer, std::shared_ptr<ep::Task> task,
         std::shared_ptr<Staging> staging)
      : buffer_(std::move(buffer)), task_(std::move(task)), staging_(std::move(staging)) {}

  const std::shared_ptr<ep::Task>& task() const { return task_; }
  // True once the results are where they belong, or the call has failed.
  bool isCompleted() const;
  // Throws the error of the call. For tensors of a device, makes the current stream wait for the
  // results; if the streams know words, it then does not wait on the host, and throws only the
  // error of a call that has already ended. Without Python's lock.
  void wait();
  // Waits on the host until the results are where they belong. Throws the error of the call.
  // Without Python's lock.
  void synchronize();

 private:
  void awaitOnHost();

  const std::shared_ptr<ep::Buffer> buffer_;
  const std::shared_ptr<ep::Task> task_;
  const std::shared_ptr<Staging> staging_;
};

}  // namespace mooncake
