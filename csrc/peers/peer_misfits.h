#pragma once

#include <cstdint>
#include <map>
#include <optional>

#include "base/mutex.h"
#include "base/result.h"
#include "group/group.h"
#include "kernels/group_state.h"

namespace mooncake {

// Calls of all_to_all with splits that do not fit, as kernels tell them. Thread-safe.
class PeerMisfits {
 public:
  // Both outlive this object.
  PeerMisfits(const Group& group, kernels::HostWords& words) : group_(group), words_(words) {}

  // Takes the misfits that kernels have told, so that they have room for more.
  void take();
  // Returns the error of a call that has changed nothing, once its kernel has ended.
  std::optional<Error> of(uint64_t call);
  // No caller asks for the call any more. Its kernel has ended.
  void forget(uint64_t call);

 private:
  void takeLocked() REQUIRES(mutex_);
  Error errorOf(const kernels::Misfit& misfit) const;

  const Group& group_;
  kernels::HostWords& words_;
  Mutex mutex_;
  uint32_t taken_ GUARDED_BY(mutex_) = 0;
  std::map<uint64_t, Error> errors_ GUARDED_BY(mutex_);  // by call
};

}  // namespace mooncake
