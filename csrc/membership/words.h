#pragma once

#include <string>

#include "membership/view_agreement.h"

// Phrases for logs and errors.
namespace mooncake {

const char* nameOf(Cause cause);
std::string listOf(const JobRanks& ranks);  // see nameRanks()
std::string whoContinues(const View& view);
std::string nowInWords();

}  // namespace mooncake
