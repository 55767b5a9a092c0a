#pragma once

#include <cstdint>
#include <map>

#include "base/bytes.h"
#include "engine/contract/evidence.h"
#include "engine/contract/transport.h"

namespace mooncake {

// The reasons that peers gave when they left, in messages ahead of their goodbyes. On the loop's
// thread.
class Farewells {
 public:
  static constexpr uint64_t kTopic = 2;
  static constexpr uint8_t kVersion = 1;

  // Wire form:  u8 version  u8 how  string why
  static Bytes encode(const Farewell& farewell);
  // Returns false if the message does not decode.
  bool take(const EngineId& from, ByteView message);
  void forget(const EngineId& peer) { given_.erase(peer); }
  // Replaces a goodbye with the farewell that its sender gave, if any.
  Evidence explain(const EngineId& peer, const Evidence& evidence) const;

 private:
  std::map<EngineId, Farewell> given_;
};

}  // namespace mooncake
