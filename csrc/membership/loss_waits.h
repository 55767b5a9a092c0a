#pragma once

#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"

namespace mooncake {

// How long the loss of a rank held up a call.
struct LossWait {
  int rank = 0;  // rank in the job
  Clock::duration time{};
};

// Append lines to a file if it exists: "RANK MICROSECONDS" for each wait, and "joined" when this
// process has become a rank of a running job. mooncake-run makes one file for each of its ranks
// (mooncake_backend/launcher/waits.py). Under any other launcher nothing is written.
Status noteJoined(const std::string& file);
Status noteWaits(const std::string& file, const std::vector<LossWait>& waits);

}  // namespace mooncake
