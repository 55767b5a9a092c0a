#include "transfer/session_id.h"

#include <algorithm>
#include <charconv>

namespace mooncake::transfer {
namespace {

constexpr size_t kMostHostBytes = 255;

}  // namespace

std::string SessionId::text() const {
  const bool isV6 = host.find(':') != std::string::npos;
  const std::string where = isV6 ? "[" + host + "]" : host;
  return port == 0 ? where : where + ":" + std::to_string(port);
}

Result<SessionId> SessionId::parse(std::string_view text) {
  const auto wrong = [&](const char* why) {
    return Error{ErrorCode::kInvalidArgument,
                 "\"" + std::string(text.substr(0, kMostHostBytes)) +
                     "\" is no session id (host:port, or [address]:port for IPv6): " + why};
  };
  SessionId id;
  std::string_view port;
  if (text.starts_with('[')) {
    const size_t end = text.find(']');
    if (end == std::string_view::npos) return wrong("the bracket is not closed");
    id.host = text.substr(1, end - 1);
    port = text.substr(end + 1);
    if (!port.empty() && !port.starts_with(':')) return wrong("a colon belongs behind the bracket");
    if (port == ":") return wrong("the port is missing");
  } else if (std::count(text.begin(), text.end(), ':') > 1) {
    id.host = text;  // a bare IPv6 address
  } else {
    const size_t colon = text.find(':');
    id.host = text.substr(0, colon);
    if (colon != std::string_view::npos) port = text.substr(colon);
    if (port == ":") return wrong("the port is missing");
  }
  if (id.host.empty() || id.host.size() > kMostHostBytes) return wrong("the host is missing");
  for (const char c : id.host) {
    const bool isNone = static_cast<unsigned char>(c) <= ' ' || c == '/' || c == '[' || c == ']';
    if (isNone) return wrong("a host has no space, slash or bracket");
  }
  if (port.empty()) return id;
  port.remove_prefix(1);
  const auto [end, error] = std::from_chars(port.data(), port.data() + port.size(), id.port);
  if (error != std::errc() || end != port.data() + port.size() || id.port == 0)
    return wrong("a port is a number from 1 to 65535");
  return id;
}

}  // namespace mooncake::transfer
