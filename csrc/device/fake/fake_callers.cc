#include "device/fake/fake_callers.h"

#include <array>
#include <pthread.h>

namespace mooncake {

void FakeCallers::note() {
  std::array<char, 16> name{};  // the kernel keeps 15 characters
  if (pthread_getname_np(pthread_self(), name.data(), name.size()) != 0) return;
  Lock lock(mutex_);
  names_.emplace(name.data());
}

std::vector<std::string> FakeCallers::names() const {
  Lock lock(mutex_);
  return {names_.begin(), names_.end()};
}

}  // namespace mooncake
