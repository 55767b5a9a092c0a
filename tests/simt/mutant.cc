#include "tests/simt/mutant.h"

#include <cstdlib>

namespace mooncake::simt {

int mutant() {
  static const int number = [] {
    const char* const text = std::getenv("MOONCAKE_SIMT_MUTANT");
    return text ? std::atoi(text) : 0;
  }();
  return number;
}

}  // namespace mooncake::simt
