#pragma once

#include "base/env.h"

namespace mooncake {

// Settings of a backend, for a group whose options do not say otherwise.
struct BackendEnv {
  bool raises = false;  // MOONCAKE_ON_FAILURE=raise: a loss ends one operation

  // kInvalidArgument names the variable, its value and what is allowed.
  static Result<BackendEnv> read();
};

}  // namespace mooncake
