#pragma once

#include <cstddef>
#include <vector>

#include "base/env.h"

namespace mooncake {

// Settings of the groups of a job. The same on all of its ranks.
struct GroupEnv {
  size_t eagerBytes = 0;  // MOONCAKE_EAGER_BYTES: 0 = chosen by the code

  // kInvalidArgument names the variable, its value and what is allowed.
  static Result<GroupEnv> read();
  static std::vector<EnvVariable> variables();
};

}  // namespace mooncake
