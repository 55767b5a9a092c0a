#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"

// Chooses the address of this host that a rank listens on and publishes. One address per engine:
// law 6 requires listeners on the chosen interface only.
namespace mooncake {

// An IPv4 or IPv6 address without a port. Link-local IPv6 addresses are always refused: they need
// the name of an interface, which differs from host to host.
struct HostAddress {
  bool isV6 = false;
  std::array<std::byte, 16> raw{};  // network order; IPv4 uses the first 4

  ByteView bytes() const { return ByteView(raw).first(isV6 ? 16 : 4); }
  bool isLoopback() const;
  std::string text() const;
  bool operator==(const HostAddress&) const = default;

  // Accepts "10.0.0.1", "fd00::1" or "[fd00::1]"; no names. kInvalidArgument says what is wrong.
  static Result<HostAddress> parse(std::string_view text);
};

struct HostInterface {
  std::string name;
  HostAddress address;
  bool hasDefaultRoute = false;
};

// Returns the usable addresses of this host: up, unicast, not link-local; in the kernel's order.
Result<std::vector<HostInterface>> listInterfaces();

// Returns the source address that the kernel would use to reach `host`, which is an address or a
// name. A name may ask DNS. Nothing is sent. Empty: there is no way to it, or the host's own name
// maps to 127.0.1.1, which says nothing about its other addresses.
std::optional<HostAddress> addressTowards(const std::string& host);

// Pure. Prefers, in this order: `wanted` (MOONCAKE_HOST_IP, set_host_ip), `towardsRendezvous`, an
// interface with a default route, any other that leads off the host, loopback. If `wanted` is not
// an address of this host, the error lists its addresses. Bridges of container runtimes come last
// among interfaces that lead off the host. IPv4 comes before IPv6.
Result<HostAddress> chooseHostAddress(const std::vector<HostInterface>& interfaces,
                                      const std::optional<std::string>& wanted,
                                      const std::optional<HostAddress>& towardsRendezvous);

}  // namespace mooncake
