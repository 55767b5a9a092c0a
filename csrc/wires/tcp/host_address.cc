#include "wires/tcp/host_address.h"

#include <algorithm>
#include <arpa/inet.h>
#include <cerrno>
#include <fstream>
#include <ifaddrs.h>
#include <memory>
#include <net/if.h>
#include <netdb.h>
#include <set>
#include <sstream>
#include <sys/socket.h>

#include "base/fd.h"

namespace mooncake {
namespace {

bool isLinkLocal(const HostAddress& address) {
  if (!address.isV6) return false;
  const auto first = std::to_integer<unsigned>(address.raw[0]);
  const auto second = std::to_integer<unsigned>(address.raw[1]);
  return first == 0xfe && (second & 0xc0) == 0x80;
}

std::optional<HostAddress> fromSockaddr(const sockaddr* from) {
  HostAddress address;
  if (from && from->sa_family == AF_INET) {
    std::memcpy(address.raw.data(), &reinterpret_cast<const sockaddr_in*>(from)->sin_addr, 4);
    return address;
  }
  if (from && from->sa_family == AF_INET6) {
    address.isV6 = true;
    std::memcpy(address.raw.data(), &reinterpret_cast<const sockaddr_in6*>(from)->sin6_addr, 16);
    return address;
  }
  return std::nullopt;
}

// Returns the names of the interfaces that have a default route. Without /proc the result is empty.
std::set<std::string> interfacesWithDefaultRoute() {
  std::set<std::string> names;
  std::string line;
  std::ifstream v4("/proc/net/route");  // name, destination, gateway, flags, ...
  while (std::getline(v4, line)) {
    std::istringstream fields(line);
    std::string name, destination;
    if (fields >> name >> destination && destination == "00000000") names.insert(name);
  }
  std::ifstream v6("/proc/net/ipv6_route");  // destination, its prefix length, ..., name
  while (std::getline(v6, line)) {
    std::istringstream fields(line);
    std::string destination, prefix, field, name;
    fields >> destination >> prefix;
    while (fields >> field) name = field;
    const bool all = destination.find_first_not_of('0') == std::string::npos && prefix == "00";
    if (all && name != "lo") names.insert(name);
  }
  return names;
}

// Every host that runs containers has the same 172.17.0.1 on its bridge.
bool isContainerBridge(const std::string& name) {
  for (const char* prefix : {"docker", "br-", "virbr", "cni", "podman", "lxc", "cali", "flannel"}) {
    if (name.starts_with(prefix)) return true;
  }
  return false;
}

int rankOf(const HostInterface& candidate) {
  if (candidate.address.isLoopback()) return 6;
  const int base = isContainerBridge(candidate.name) ? 4 : candidate.hasDefaultRoute ? 0 : 2;
  return base + (candidate.address.isV6 ? 1 : 0);
}

std::string choices(const std::vector<HostInterface>& interfaces) {
  std::string text;
  for (const auto& one : interfaces) {
    text += (text.empty() ? "" : ", ") + one.address.text() + " (" + one.name + ")";
  }
  return text.empty() ? "none" : text;
}

}  // namespace

bool HostAddress::isLoopback() const {
  if (!isV6) return raw[0] == std::byte{127};
  return std::all_of(raw.begin(), raw.end() - 1, [](std::byte b) { return b == std::byte{0}; }) &&
         raw[15] == std::byte{1};
}

std::string HostAddress::text() const {
  char buffer[INET6_ADDRSTRLEN];
  return ::inet_ntop(isV6 ? AF_INET6 : AF_INET, raw.data(), buffer, sizeof(buffer));
}

Result<HostAddress> HostAddress::parse(std::string_view text) {
  std::string plain(text);
  if (plain.size() > 2 && plain.front() == '[' && plain.back() == ']')
    plain = plain.substr(1, plain.size() - 2);
  HostAddress address;
  if (::inet_pton(AF_INET, plain.c_str(), address.raw.data()) == 1) return address;
  address.isV6 = true;
  const bool isScoped = plain.find('%') != std::string::npos;
  const bool parsed =
      ::inet_pton(AF_INET6, plain.substr(0, plain.find('%')).c_str(), address.raw.data()) == 1;
  if (parsed && (isScoped || isLinkLocal(address))) {
    return Error{
        ErrorCode::kInvalidArgument,
        "'" + plain +
            "' is a link-local address: it means nothing on another host, use a global one"};
  }
  if (!parsed)
    return Error{ErrorCode::kInvalidArgument, "'" + plain + "' is not an IPv4 or IPv6 address"};
  return address;
}

Result<std::vector<HostInterface>> listInterfaces() {
  ifaddrs* head = nullptr;
  if (::getifaddrs(&head) != 0) return systemError("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(head, &::freeifaddrs);
  const auto defaults = interfacesWithDefaultRoute();
  std::vector<HostInterface> interfaces;
  for (const ifaddrs* one = head; one; one = one->ifa_next) {
    const auto address = fromSockaddr(one->ifa_addr);
    if (!address || !(one->ifa_flags & IFF_UP) || isLinkLocal(*address)) continue;
    interfaces.push_back({one->ifa_name, *address, defaults.contains(one->ifa_name)});
  }
  return interfaces;
}

std::optional<HostAddress> addressTowards(const std::string& host) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;
  addrinfo* head = nullptr;
  if (::getaddrinfo(host.c_str(), "9", &hints, &head) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(head, &::freeaddrinfo);
  const bool meansThisHost = host == "localhost" || HostAddress::parse(host).ok();
  for (const addrinfo* one = head; one; one = one->ai_next) {
    const Fd probe(::socket(one->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage source{};
    socklen_t length = sizeof(source);
    if (!probe || ::connect(probe.get(), one->ai_addr, one->ai_addrlen) != 0) continue;
    if (::getsockname(probe.get(), reinterpret_cast<sockaddr*>(&source), &length) != 0) continue;
    const auto address = fromSockaddr(reinterpret_cast<const sockaddr*>(&source));
    if (!address || isLinkLocal(*address)) continue;
    if (address->isLoopback() && !meansThisHost) continue;
    return address;
  }
  return std::nullopt;
}

Result<HostAddress> chooseHostAddress(const std::vector<HostInterface>& interfaces,
                                      const std::optional<std::string>& wanted,
                                      const std::optional<HostAddress>& towardsRendezvous) {
  const auto isOurs = [&](const HostAddress& address) {
    return std::any_of(interfaces.begin(), interfaces.end(),
                       [&](const HostInterface& one) { return one.address == address; });
  };
  if (wanted) {
    const auto address = HostAddress::parse(*wanted);
    if (address.ok() && isOurs(*address)) return *address;
    const std::string why =
        address.ok() ? "'" + *wanted + "' is not an address of this host" : address.error().message;
    return Error{ErrorCode::kInvalidArgument,
                 "MOONCAKE_HOST_IP: " + why + "; there are: " + choices(interfaces)};
  }
  if (towardsRendezvous && isOurs(*towardsRendezvous)) return *towardsRendezvous;
  const auto best =
      std::min_element(interfaces.begin(), interfaces.end(),
                       [](const auto& a, const auto& b) { return rankOf(a) < rankOf(b); });
  if (best == interfaces.end())
    return Error{ErrorCode::kUnsupported, "this host has no IP address, not even loopback"};
  return best->address;
}

}  // namespace mooncake
