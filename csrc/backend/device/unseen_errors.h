#pragma once

#include <atomic>
#include <exception>
#include <memory>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/mutex.h"

namespace mooncake {

// Operations whose wait() may have returned before they ended. The first error that no caller has
// raised goes to the works of later calls, which raise it in their wait().
class UnseenErrors {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Flag = std::shared_ptr<std::atomic<bool>>;

  struct Unseen {
    std::exception_ptr error;
    Flag isRaised;  // set by the caller that raises it
  };

  // Watches a collective, a message, or a batch of them, until it has ended. The caller sets the flag
  // when it raises its error.
  void add(WorkPtr work, Flag isRaised);
  // Returns the first error that no caller has raised, or one without an error. Forgets operations
  // that have ended.
  Unseen first();

 private:
  struct Entry {
    WorkPtr work;
    Flag isRaised;
  };

  Mutex mutex_;
  std::vector<Entry> entries_ GUARDED_BY(mutex_);  // in the order of add()
  // The operation whose error is not raised yet; none: null.
  Entry first_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
