#pragma once

#include <cstdlib>
#include <string>
#include <vector>

namespace mooncake::test {

// While this lives, engines of this process that use transport fabric find libfabric's own provider
// on the loopback device. No other thread may read the environment while it is made or destroyed.
class LoopbackCards {
 public:
  explicit LoopbackCards(const std::vector<std::string>& transports)
      : isSet_(transports == std::vector<std::string>{"fabric"}) {
    if (!isSet_) return;
    ::setenv("MOONCAKE_FABRIC_REQUIRE", "tcp;ofi_rxm", 1);
    ::setenv("MC_TE_FILTERS", "127.0.0.1", 1);
  }
  ~LoopbackCards() {
    if (!isSet_) return;
    ::unsetenv("MOONCAKE_FABRIC_REQUIRE");
    ::unsetenv("MC_TE_FILTERS");
  }
  LoopbackCards(const LoopbackCards&) = delete;
  LoopbackCards& operator=(const LoopbackCards&) = delete;

 private:
  const bool isSet_;
};

}  // namespace mooncake::test
