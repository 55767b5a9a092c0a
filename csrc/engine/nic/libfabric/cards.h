#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/fabric_env.h"
#include "engine/nic/device_memory.h"
#include "engine/nic/nic.h"

// The door to libfabric. Neither it nor what goes through it needs libfabric's headers; in a build
// without them every call says so (absent.cc).
namespace mooncake {

// What fi_getinfo says of a card before it is opened.
struct LibfabricCard {
  std::string name;        // of the device: "rdmap79s0", "eth1", "shm"; of an address: "127.0.0.2"
  std::string provider;    // "efa", "tcp;ofi_rxm"
  std::string fabric;      // cards of one fabric reach each other
  std::string pciAddress;  // "0000:4f:00.0", where the provider tells
  uint64_t bitsPerSecond = 0;  // where the provider tells
  std::shared_ptr<void> info;  // the fi_info that opens it
};

// Whether this build can, and with which library: one line for people.
Result<std::string> describeLibfabric(const FabricEnv& env);

// The cards of the first provider of `env` that has some, as the filters leave them. kUnsupported
// says what is missing: the library, the provider (and which ones there are), or the device.
Result<std::vector<LibfabricCard>> listLibfabricCards(const FabricEnv& env);

// `places` tells GPU memory from the host's and outlives the card.
Result<std::unique_ptr<Nic>> openLibfabricNic(const LibfabricCard& card, const FabricEnv& env,
                                              const MemoryPlaces& places = MemoryPlaces::real());

}  // namespace mooncake
