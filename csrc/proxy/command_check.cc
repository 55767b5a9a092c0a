#include "proxy/command_check.h"

namespace mooncake::proxy {

using kernels::kNoSignal;
using kernels::ProxyCommand;

namespace {

constexpr uint64_t kMostBytes = uint64_t(64) << 20;  // of a command: of a put, too

std::string rangeText(const char* preposition, uint32_t region, uint64_t offset) {
  return std::string(preposition) + " region " + std::to_string(region) + " at " +
         std::to_string(offset);
}

bool isInside(uint64_t offset, uint64_t bytes, uint64_t room) {
  return offset <= room && bytes <= room - offset;
}

}  // namespace

std::string describe(const ProxyCommand& command) {
  return "command " + std::to_string(command.valid - 1) + ", " + std::to_string(command.bytes) +
         " bytes" + rangeText(" of", command.sourceRegion, command.sourceOffset) +
         rangeText(" to", command.targetRegion, command.targetOffset);
}

Status check(const ProxyCommand& command, std::span<const LocalRegion> sources,
             const Regions& targets) {
  const auto wrong = [&](const std::string& cause) {
    return Status(ErrorCode::kInvalidArgument,
                  describe(command) + ": " + cause +
                      ": correct the kernel that called put(). The ring takes no more commands");
  };
  if (command.bytes > kMostBytes) return wrong("a command has at most 64 MiB");
  if (command.sourceRegion >= sources.size())
    return wrong("this rank has " + std::to_string(sources.size()) + " regions");
  const size_t here = sources[command.sourceRegion].memory.size();
  if (!isInside(command.sourceOffset, command.bytes, here))
    return wrong("the source has " + std::to_string(here) + " bytes");
  if (command.targetRegion >= targets.regions.size())
    return wrong("the peer has " + std::to_string(targets.regions.size()) + " regions");
  const uint64_t there = targets.regions[command.targetRegion].remote.bytes;
  if (!isInside(command.targetOffset, command.bytes, there))
    return wrong("the target has " + std::to_string(there) + " bytes");
  if (command.signal != kNoSignal && command.signal >= targets.signalWords) {
    return wrong("it names signal word " + std::to_string(command.signal) + ", the peer has " +
                 std::to_string(targets.signalWords));
  }
  return {};
}

}  // namespace mooncake::proxy
