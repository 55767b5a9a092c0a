#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/bytes.h"
#include "base/result.h"

// Which of this host's addresses a rank listens on and publishes. One address per engine: law 6
// wants listeners on the chosen interface only.
namespace mooncake {

// An IPv4 or IPv6 address without a port. Link-local IPv6 addresses are refused everywhere: they
// mean nothing without the name of an interface, which differs from host to host.
struct HostAddress {
  bool isV6 = false;
  std::array<std::byte, 16> raw{};  // network order; the first 4 for IPv4

  ByteView bytes() const { return ByteView(raw).first(isV6 ? 16 : 4); }
  bool isLoopback() const;
  std::string text() const;
  bool operator==(const HostAddress&) const = default;

  // "10.0.0.1", "fd00::1" or "[fd00::1]"; no names. kInvalidArgument says what is wrong.
  static Result<HostAddress> parse(std::string_view text);
};

struct HostInterface {
  std::string name;
  HostAddress address;
  bool hasDefaultRoute = false;
};

// Every usable address of this host: up, unicast, not link-local; in the kernel's order.
Result<std::vector<HostInterface>> listInterfaces();

// The source address that the kernel would use to reach `host` (an address or a name; a name may
// ask DNS). Nothing is sent. Empty when there is no way, or when a name of this host stands for
// 127.0.1.1, which says nothing about the others.
std::optional<HostAddress> addressTowards(const std::string& host);

// Pure. In this order: `wanted` (MOONCAKE_HOST_IP, set_host_ip), which must be one of ours, else
// the error names the choices; `towardsRendezvous`; an interface with a default route; any that
// leads off the host; loopback. Bridges of container runtimes come after all others that leave the
// host; IPv4 comes before IPv6.
Result<HostAddress> chooseHostAddress(const std::vector<HostInterface>& interfaces,
                                      const std::optional<std::string>& wanted,
                                      const std::optional<HostAddress>& towardsRendezvous);

}  // namespace mooncake
