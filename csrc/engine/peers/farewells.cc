#include "engine/peers/farewells.h"

#include <string>
#include <string_view>
#include <utility>

namespace mooncake {
namespace {

constexpr size_t kMostText = 512;

}  // namespace

Bytes Farewells::encode(const Farewell& farewell) {
  return ByteWriter()
      .put(kVersion)
      .put(static_cast<uint8_t>(farewell.how))
      .putString(std::string_view(farewell.why).substr(0, kMostText))
      .take();
}

bool Farewells::take(const EngineId& from, ByteView message) {
  ByteReader in(message);
  const auto version = in.get<uint8_t>();
  const auto how = in.get<uint8_t>();
  std::string why = in.getString(kMostText);
  const bool isKnown = how == static_cast<uint8_t>(Farewell::How::kEnded) ||
                       how == static_cast<uint8_t>(Farewell::How::kFailed);
  if (!in.finish("farewell").ok() || version != kVersion || !isKnown) return false;
  given_[from] = {static_cast<Farewell::How>(how), std::move(why)};
  return true;
}

Evidence Farewells::explain(const EngineId& peer, const Evidence& evidence) const {
  const auto said = given_.find(peer);
  if (!evidence.isGoodbye() || said == given_.end()) return evidence;
  const auto& [how, why] = said->second;
  if (how == Farewell::How::kFailed) return {Evidence::Kind::kFailed, why, evidence.when};
  return {Evidence::Kind::kEnded,
          why.empty() ? "its program ended without destroy_process_group()" : why, evidence.when};
}

}  // namespace mooncake
