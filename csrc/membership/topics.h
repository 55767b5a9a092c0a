#pragma once

#include <cstdint>
#include <string>
#include <utility>

#include "base/result.h"

namespace mooncake {

// Two message topics (engine/peers/message_router.h) for users that name themselves alike: the same
// in all processes, and different from the topics of any other name.
Result<std::pair<uint64_t, uint64_t>> topicsOf(const std::string& identity);

}  // namespace mooncake
