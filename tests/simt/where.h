#pragma once

#include <string>

namespace mooncake::simt {

// A place in a kernel's source, for reports. clang 14 has no std::source_location with libstdc++.
struct Where {
  const char* file = "";
  int line = 0;

  static constexpr Where current(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }
  std::string text() const;  // "allreduce.cuh:43"
};

}  // namespace mooncake::simt
