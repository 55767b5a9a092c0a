#include "engine/nic/libfabric/cards.h"
#include "nic_suite.h"

namespace mooncake::testing {
namespace {

FabricEnv onProvider(const std::string& provider, const std::string& device) {
  FabricEnv env;
  env.requiredProvider = provider;
  if (!device.empty()) env.devices = {device};
  return env;
}

Result<std::unique_ptr<Nic>> openFirst(const FabricEnv& env) {
  auto cards = listLibfabricCards(env);
  if (!cards.ok()) return cards.error();
  return openLibfabricNic(cards->front(), env);
}

struct OverTcp {
  static Result<std::unique_ptr<Nic>> open() {
    return openFirst(onProvider("tcp;ofi_rxm", "127.0.0.1"));
  }
  static constexpr bool kMovesBytes = true;
  static constexpr bool kChecksKeys = true;
  static constexpr bool kNoticesTheGone = true;
  static constexpr std::chrono::milliseconds kTimeout{500};
};
INSTANTIATE_TYPED_TEST_SUITE_P(LibfabricTcpRxm, NicSuite, OverTcp);

struct OverShm : OverTcp {
  static Result<std::unique_ptr<Nic>> open() { return openFirst(onProvider("shm", "")); }
  // Provider shm 1.17 stops for good at a request that it refuses.
  static constexpr bool kChecksKeys = false;
};
INSTANTIATE_TYPED_TEST_SUITE_P(LibfabricShm, NicSuite, OverShm);

struct OverSockets : OverTcp {
  static Result<std::unique_ptr<Nic>> open() {
    return openFirst(onProvider("sockets", "127.0.0.1"));
  }
};
INSTANTIATE_TYPED_TEST_SUITE_P(LibfabricSockets, NicSuite, OverSockets);

}  // namespace
}  // namespace mooncake::testing
