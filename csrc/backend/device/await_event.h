#pragma once

#include <c10/core/Event.h>

#include "base/deadline.h"

namespace mooncake {

// Waits on the host. Returns false if the deadline passed first. The current device must be the
// event's, else torch may make a context on another one. Throws torch's errors.
bool awaitEvent(const c10::Event& event, Deadline deadline);

}  // namespace mooncake
