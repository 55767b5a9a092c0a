#pragma once

#include <string>
#include <vector>

#include "base/bytes.h"
#include "membership/join_options.h"

namespace mooncake {

// What a new process needs to find a running job without its store: any member hands it out. It
// holds addresses and no secret; the new process has to know the job's key.
struct JoinToken {
  static constexpr size_t kMostMembers = 4;

  std::string job;             // JobIdentity::job
  std::vector<Bytes> members;  // Engine::endpoint() of active ranks

  bool operator==(const JoinToken&) const = default;
};

Bytes encodeJoinToken(const JoinToken& token);
// kMismatch: another version. kProtocol: it does not make sense.
Result<JoinToken> decodeJoinToken(ByteView bytes);

}  // namespace mooncake
