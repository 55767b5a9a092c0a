#pragma once

#include <memory>
#include <utility>

#include "backend/device/staging.h"
#include "ep/buffer.h"

namespace mooncake {

// A dispatch or combine that was submitted.
class EpWork {
 public:
  virtual ~EpWork() = default;

  // Null: no task of the buffer's thread does it.
  virtual std::shared_ptr<ep::Task> task() const { return nullptr; }
  // True once the results are where they belong, or the call has failed.
  virtual bool isCompleted() const = 0;
  // Throws the error of the call. For tensors of a device, makes the current stream wait for the
  // results; by kernels, and if the streams know words, it then does not wait on the host, and throws
  // only the error of a call that has already ended. Without Python's lock.
  virtual void wait() = 0;
  // Waits on the host until the results are where they belong. Throws the error of the call.
  // Without Python's lock.
  virtual void synchronize() = 0;
};

// One that the buffer's thread or the caller's does.
class EpTaskWork final : public EpWork {
 public:
  // `staging`: null for a call with CPU tensors. `blocks`: wait() also does what synchronize() does.
  EpTaskWork(std::shared_ptr<ep::Buffer> buffer, std::shared_ptr<ep::Task> task,
             std::shared_ptr<Staging> staging, bool blocks)
      : buffer_(std::move(buffer)),
        task_(std::move(task)),
        staging_(std::move(staging)),
        blocks_(blocks) {}

  std::shared_ptr<ep::Task> task() const override { return task_; }
  bool isCompleted() const override;
  void wait() override;
  void synchronize() override;

 private:
  void awaitOnHost();

  const std::shared_ptr<ep::Buffer> buffer_;
  const std::shared_ptr<ep::Task> task_;
  const std::shared_ptr<Staging> staging_;
  const bool blocks_;
};

}  // namespace mooncake
