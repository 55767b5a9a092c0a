#pragma once

#include <atomic>
#include <deque>
#include <memory>
#include <mutex>

#include <torch/csrc/distributed/c10d/Work.hpp>

namespace mooncake {

// Operations whose wait() may have returned before they ended. The error of one that failed later
// is raised by the next call of the group.
class UnseenErrors {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Flag = std::shared_ptr<std::atomic<bool>>;

  // Watches an operation until it has ended. The caller sets the flag when it raises its error.
  Flag add(WorkPtr work);
  // Throws the first error that no caller has raised. Forgets operations that have ended.
  void raise();

 private:
  struct Entry {
    WorkPtr work;
    Flag isRaised;
  };
  std::mutex mutex_;  // guards entries_
  std::deque<Entry> entries_;
};

}  // namespace mooncake
