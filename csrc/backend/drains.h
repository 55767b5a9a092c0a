#pragma once

#include <memory>

#include "base/deadline.h"

namespace mooncake {

// Work that threads of ours still do for the program when its groups are gone.
class Drain {
 public:
  virtual ~Drain() = default;
  virtual bool isIdle() const = 0;
  // The calling thread does a part of this work, so the work cannot end while that thread waits.
  virtual bool isCallerInside() const = 0;
  // Returns whether it was idle before the deadline. True at once if isCallerInside().
  virtual bool drain(Deadline deadline) = 0;
};

// Has drainAll() know it as long as it lives. A forked child knows only the drains that it makes.
void addDrain(std::weak_ptr<Drain> drain);
// Returns whether all drains of this process were idle at once before the deadline, except drains
// that the calling thread works for.
bool drainAll(Deadline deadline);

}  // namespace mooncake
