#pragma once

#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/result.h"

namespace mooncake {

// How long a call was held up by the loss of a rank.
struct LossWait {
  int rank = 0;  // of the job
  Clock::duration time{};
};

// Appends a line for each, "RANK MICROSECONDS", if the file is there: mooncake-run makes it for
// each of its ranks, and reads it when that has ended (mooncake_backend/launcher/waits.py). Under
// any other launcher nothing is written.
Status noteWaits(const std::string& file, const std::vector<LossWait>& waits);

}  // namespace mooncake
