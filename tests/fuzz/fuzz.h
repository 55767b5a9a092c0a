#pragma once

#include <cstdlib>
#include <functional>
#include <string>

#include "base/bytes.h"

// What every target of libFuzzer in this folder has beside LLVMFuzzerTestOneInput.
namespace mooncake::fuzz {

// A sanitizer is not needed to see this.
inline void require(bool holds) {
  if (!holds) std::abort();
}

// Inputs to begin with, each of a name of its own.
using Seeds = std::function<void(const std::string& name, ByteView input)>;
void writeSeeds(const Seeds& seed);

}  // namespace mooncake::fuzz
