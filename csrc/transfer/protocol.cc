#include "transfer/protocol.h"

#include <algorithm>
#include <filesystem>
#include <iterator>

#include "base/log.h"
#include "engine/transports/registry.h"

namespace mooncake::transfer {
namespace {

// Known names whose wires are not built.
constexpr const char* kKnown[] = {
    "rdma", "efa", "nvlink", "nvlink_intra", "hip",     "musa",         "maca", "barex", "ascend",
    "cxl",  "cxi", "ub",     "xgmi",         "ubshmem", "sunrise_link", "nccl", "nvmeof"};

bool isAnyIn(const char* folder) {
  std::error_code error;
  const std::filesystem::directory_iterator entries(folder, error);
  return !error && entries != std::filesystem::directory_iterator();
}

std::string whyNot(const std::string& protocol) {
  if (protocol == "rdma" && !isAnyIn("/sys/class/infiniband"))
    return "this machine has no RDMA device (/sys/class/infiniband is empty)";
  if (protocol == "efa" && !isAnyIn("/sys/class/infiniband"))
    return "this machine has no EFA device (/sys/class/infiniband is empty)";
  if (protocol == "nvlink" || protocol == "nvlink_intra") return "this build moves no GPU memory";
  const bool isKnown = std::any_of(std::begin(kKnown), std::end(kKnown),
                                   [&](const char* name) { return protocol == name; });
  return isKnown ? "this version has no wire for it" : "no protocol is called so";
}

std::vector<std::string> wiresOf(const std::string& protocol, bool forcesTcp) {
  if (protocol == "shm") return {"inproc", "shm"};
  if (forcesTcp) return {"tcp"};
  std::vector<std::string> all;
  for (const TransportEntry& entry : transportRegistry()) {
    if (!entry.isForTests) all.emplace_back(entry.name);
  }
  return all;
}

}  // namespace

Result<std::string> selectProtocol(Env& env, const TransferEnv& settings,
                                   const std::string& protocol, const std::string& logName) {
  std::string chosen = protocol;
  if (protocol != "tcp" && protocol != "shm") {
    const std::string why =
        "protocol \"" + protocol + "\" cannot be had: " + whyNot(protocol) + "; there is: tcp, shm";
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
