// What a metadata server may hold, names of engines, and a topology that somebody wrote.
#include "fuzz.h"
#include "transfer/http_metadata.h"
#include "transfer/session_id.h"
#include "wires/nic/topology_json.h"

using mooncake::transfer::fieldOf;
using mooncake::transfer::SessionId;

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  for (const char* field : {"engine", "ip_or_host_name", "rpc_port", "incarnation"})
    (void)fieldOf(text, field);
  if (const auto session = SessionId::parse(text); session.ok()) {
    const auto again = SessionId::parse(session->text());
    mooncake::fuzz::require(again.ok() && again->text() == session->text());
  }
  if (const auto topology = mooncake::parseTopologyJson(text); topology.ok()) {
    const std::string written = mooncake::writeTopologyJson(*topology);
    const auto again = mooncake::parseTopologyJson(written);
    mooncake::fuzz::require(again.ok() && mooncake::writeTopologyJson(*again) == written);
  }
  return 0;
}

void mooncake::fuzz::writeSeeds(const Seeds& seed) {
  const auto text = [&](const char* name, std::string_view value) {
    seed(name, std::as_bytes(std::span(value)));
  };
  text("record", R"({"ip_or_host_name": "10.0.0.1", "rpc_port": 15000, "engine": "mooncake"})");
  text("escapes", R"({"a\"b\\": "é", "n": -1.5e3})");
  text("v4", "10.0.0.1:15000");
  text("v6", "[fe80::1%eth0]:15000");
  text("host", "node-a");
  text("brackets inside", "a[fe80::1]:1");
  text("topology", R"({"cpu:0": [["near", "a"], ["far"]], "cuda:0": [[], []]})");
}
