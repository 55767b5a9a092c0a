#pragma once

#include <string>

#include "membership/view_agreement.h"

// Phrases for logs and errors.
namespace mooncake {

const char* nameOf(Cause cause);
std::string listOf(const JobRanks& ranks);  // "rank 3", "ranks 0, 2, 4-9"
std::string whoContinues(const View& view);
std::string nowInWords();

}  // namespace mooncake
