#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/bytes.h"
#include "engine/memory/region_table.h"

// The question that a session port receives, and the engine's description of itself in answer. Wire
// form, after the engine's handshake (wires/stream/handshake.h):
//   question  u32 bytes of what follows, u8 version, u8 kind
//   answer    u32 bytes of what follows, u8 version, string name, string protocol, bytes endpoint,
//             u32 count, count x { u64 address, u64 bytes, u64 key, u32 rights, string location }
namespace mooncake::transfer {

constexpr size_t kMostQuestionBytes = 64;
constexpr size_t kMostAnswerBytes = size_t(64) << 20;
constexpr size_t kMostNameBytes = 512;
constexpr size_t kMostLocationBytes = 64;

struct Question {
  enum class Kind : uint8_t { kDescribe = 1, kProbe };
  Kind kind = Kind::kDescribe;

  Bytes encode() const;  // without the length
  static Result<Question> decode(ByteView message);
};

// Memory that an engine has registered. Peers name it by its address in that engine's process.
struct RemoteBuffer {
  RemoteRegion region;
  uint32_t rights = 0;
  std::string location;  // "*", "cpu:0"
};

struct SegmentDescription {
  std::string name;
  std::string protocol;
  Bytes endpoint;                     // the engine's (Engine::endpoint())
  std::vector<RemoteBuffer> buffers;  // in the order of registration

  Bytes encode() const;  // without the length
  static Result<SegmentDescription> decode(ByteView message);
};

}  // namespace mooncake::transfer
