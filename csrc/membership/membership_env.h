#pragma once

#include <string>
#include <vector>

#include "base/env.h"

namespace mooncake {

// Settings of the membership of a job.
struct MembershipEnv {
  std::string waitsFile;  // beside the file that TORCHELASTIC_ERROR_FILE names: see loss_waits.h

  static Result<MembershipEnv> read();
  static std::vector<EnvVariable> variables();
};

}  // namespace mooncake
