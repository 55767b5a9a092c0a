#include "transfer/protocol.h"

#include <algorithm>
#include <iterator>

#include "base/log.h"
#include "device/accelerators.h"
#include "engine/contract/registry.h"
#include "wires/nic/libfabric/cards.h"

namespace mooncake::transfer {
namespace {

// Mooncake's protocols that this version does not implement.
constexpr const char* kKnown[] = {"nvlink",  "hip",          "musa", "maca",  "barex",
                                  "ascend",  "cxl",          "cxi",  "ub",    "xgmi",
                                  "ubshmem", "sunrise_link", "nccl", "nvmeof"};

// Devices of a host read each other's memory.
constexpr const char* kDeviceProtocol = "nvlink_intra";

// Protocols over network cards, and libfabric's provider for each. For `fabric` the environment
// selects it.
struct CardProtocol {
  const char* name;
  const char* provider;
};
constexpr CardProtocol kCardProtocols[] = {
    {"efa", "efa"}, {"rdma", "verbs;ofi_rxm"}, {"fabric", ""}};

const CardProtocol* cardProtocol(const std::string& protocol) {
  const auto* found = std::find_if(std::begin(kCardProtocols), std::end(kCardProtocols),
                                   [&](const CardProtocol& one) { return protocol == one.name; });
  return found == std::end(kCardProtocols) ? nullptr : found;
}

// Sets the provider for the engine's transport. Fails if this host has no such card.
Status selectCards(EngineEnv& env, const CardProtocol& protocol) {
  env.fabricProvider = protocol.provider;
  env.fabricProviderWish = std::string("protocol ") + protocol.name;
  const auto fabric = FabricEnv::read(env);
  if (!fabric.ok()) return fabric.status();
  return listLibfabricCards(*fabric).status();
}

Status select(EngineEnv& env, const std::string& protocol) {
  if (protocol == "tcp" || protocol == "shm") return {};
  if (protocol == kDeviceProtocol) {
    MOONCAKE_TRY(openAccelerator("cuda"));
    env.mapsDeviceMemory = true;
    return {};
  }
  if (const CardProtocol* cards = cardProtocol(protocol)) return selectCards(env, *cards);
  std::string why = "no protocol is called so";
  if (std::find(std::begin(kKnown), std::end(kKnown), protocol) != std::end(kKnown)) {
    why = "this version has no wire for it";
  }
  return {ErrorCode::kUnsupported, why};
}

std::vector<std::string> wiresOf(const std::string& protocol, bool forcesTcp) {
  if (protocol == "shm" || protocol == kDeviceProtocol) return {"inproc", "shm"};
  if (forcesTcp) return {"tcp"};
  if (cardProtocol(protocol)) return {"inproc", "shm", "fabric"};
  std::vector<std::string> all;
  for (const TransportEntry& entry : transportRegistry()) {
    if (!entry.isOnlyByName) all.emplace_back(entry.name);
  }
  return all;
}

}  // namespace

bool usesCards(const std::string& protocol) { return cardProtocol(protocol) != nullptr; }

Result<std::string> selectProtocol(EngineEnv& env, const TransferEnv& settings,
                                   const std::string& protocol, const std::string& logName) {
  std::string chosen = protocol;
  const bool isForced = settings.forcesTcp && protocol != "tcp" && protocol != "shm";
  const Status selected = isForced ? Status() : select(env, protocol);
  if (isForced || !selected.ok()) {
    std::string why = "protocol \"" + protocol + "\" is not tried";
    if (!selected.ok()) {
      why = "protocol \"" + protocol + "\" cannot be had: " + selected.error().message +
            "; there is: tcp, shm";
    }
    if (!settings.allowsFallback && !settings.forcesTcp) {
      return Error{ErrorCode::kUnsupported, why + ". MOONCAKE_ALLOW_FALLBACK=1 takes tcp instead"};
    }
    log(LogLevel::kWarning, logName, why, "; tcp is used instead, as asked for by ",
        settings.forcesTcp ? "MC_FORCE_TCP" : "MOONCAKE_ALLOW_FALLBACK");
    chosen = "tcp";
  }
  const auto wires = wiresOf(chosen, settings.forcesTcp);
  if (env.transports.empty()) {
    env.transports = wires;
    return chosen;
  }
  for (const std::string& one : env.transports) {
    const bool isOfIt = std::find(wires.begin(), wires.end(), one) != wires.end() ||
                        (chosen == "tcp" && one == "sim");
    if (!isOfIt) {
      return Error{ErrorCode::kInvalidArgument, "MOONCAKE_TRANSPORTS asks for \"" + one +
                                                    "\", which is no wire of protocol \"" + chosen +
                                                    "\""};
    }
  }
  return chosen;
}

}  // namespace mooncake::transfer
