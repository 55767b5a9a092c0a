#pragma once

#include <cstddef>

#include "base/env.h"

namespace mooncake {

// Settings of the fake devices of a process.
struct FakeEnv {
  size_t queues = 8;  // FAKE_QUEUES: see makeFakeDevices()

  // kInvalidArgument names the variable, its value and what is allowed.
  static Result<FakeEnv> read();
};

}  // namespace mooncake
