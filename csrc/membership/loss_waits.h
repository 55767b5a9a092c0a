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

// Appends a line "RANK MICROSECONDS" for each wait if the file exists. mooncake-run makes one file
// for each of its ranks, and reads it when that rank has ended
// (mooncake_backend/launcher/waits.py). Under any other launcher nothing is written.
Status noteWaits(const std::string& file, const std::vector<LossWait>& waits);

}  // namespace mooncake
