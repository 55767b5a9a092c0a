#pragma once

#include <set>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace mooncake {

// The names of the threads that have called the devices. Thread-safe.
class FakeCallers {
 public:
  // Notes the calling thread by its present name.
  void note();
  std::vector<std::string> names() const;

 private:
  mutable Mutex mutex_;
  std::set<std::string> names_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
