#include "proxy/regions.h"

#include <string>

namespace mooncake::proxy {
namespace {

void put(ByteWriter& out, const RemoteRegion& region) {
  out.put(region.address).put(region.bytes).put(region.key);
}

RemoteRegion getRegion(ByteReader& in) {
  RemoteRegion region;
  region.address = in.get<uint64_t>();
  region.bytes = in.get<uint64_t>();
  region.key = in.get<uint64_t>();
  return region;
}

}  // namespace

Bytes Regions::encode() const {
  ByteWriter out;
  out.put(kVersion).put(ranks).put(signalWords);
  put(out, signals);
  out.put(uint32_t(regions.size()));
  for (const TargetRegion& region : regions) {
    put(out, region.remote);
    out.put(uint8_t(region.isOfDevice));
  }
  return out.take();
}

Result<Regions> Regions::decode(ByteView bytes, const std::string& from) {
  const std::string what = "the proxy's regions of " + from;
  ByteReader in(bytes);
  const auto version = in.get<uint32_t>();
  if (!in.failed() && version != kVersion) {
    return {ErrorCode::kProtocol, what + " have version " + std::to_string(version) + ", not " +
                                      std::to_string(kVersion) +
                                      ": install the same version of the package on all ranks"};
  }
  Regions made;
  made.ranks = in.get<uint32_t>();
  made.signalWords = in.get<uint32_t>();
  made.signals = getRegion(in);
  const auto count = in.get<uint32_t>();
  for (uint32_t i = 0; i < count && i < kMostRegions && !in.failed(); ++i) {
    const RemoteRegion remote = getRegion(in);
    made.regions.push_back({remote, in.get<bool>()});
  }
  MOONCAKE_TRY(in.finish(what));
  if (made.ranks > kMostRanks || made.signalWords > kMostSignalWords ||
      made.signals.bytes < made.wordsOf(made.ranks)) {
    return {ErrorCode::kProtocol, what + " contradict each other: are its messages its own?"};
  }
  return made;
}

}  // namespace mooncake::proxy
