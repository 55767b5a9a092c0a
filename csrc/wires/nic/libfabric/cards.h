#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "wires/nic/device_memory.h"
#include "wires/nic/fabric_env.h"
#include "wires/nic/nic.h"

// The entry to libfabric. Its callers do not need libfabric's headers. In a build without them
// every call fails and says so (absent.cc).
namespace mooncake {

// A card before it is opened, as fi_getinfo describes it.
struct LibfabricCard {
  std::string name;            // device: "rdmap79s0", "eth1", "shm"; address: "127.0.0.2"
  std::string provider;        // "efa", "tcp;ofi_rxm"
  std::string fabric;          // cards of one fabric reach each other
  std::string pciAddress;      // "0000:4f:00.0", if the provider tells
  uint64_t bitsPerSecond = 0;  // if the provider tells
  std::shared_ptr<void> info;  // the fi_info that opens it
};

// Returns the library that this build uses: one line for people. Fails if it cannot use one.
Result<std::string> describeLibfabric(const FabricEnv& env);

// Returns the cards of the first provider in `env` that has any, after the filters. kUnsupported
// says what is missing: the library, the provider (and which ones there are), or the device.
Result<std::vector<LibfabricCard>> listLibfabricCards(const FabricEnv& env);

// `places` tells GPU memory from host memory, and outlives the card.
Result<std::unique_ptr<Nic>> openLibfabricNic(const LibfabricCard& card, const FabricEnv& env,
                                              const MemoryPlaces& places = MemoryPlaces::real());

}  // namespace mooncake
