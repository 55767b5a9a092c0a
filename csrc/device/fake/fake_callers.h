#pragma once

#include <mutex>
#include <set>
#include <string>
#include <vector>

namespace mooncake {

// The names of the threads that have called the devices. Thread-safe.
class FakeCallers {
 public:
  // Notes the calling thread by its present name.
  void note();
  std::vector<std::string> names() const;

 private:
  mutable std::mutex mutex_;  // guards names_
  std::set<std::string> names_;
};

}  // namespace mooncake
