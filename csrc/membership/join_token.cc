#include "membership/join_token.h"

#include "membership/join_messages.h"

namespace mooncake {
namespace {

constexpr uint32_t kMagic = 0x4e4a4d4d;  // "MMJN"
constexpr uint8_t kVersion = 1;

}  // namespace

Bytes encodeJoinToken(const JoinToken& token) {
  ByteWriter out;
  out.put(kMagic).put(kVersion).putString(token.job).put(uint8_t(token.members.size()));
  for (const Bytes& member : token.members) out.putBytes(member);
  return out.take();
}

Result<JoinToken> decodeJoinToken(ByteView bytes) {
  ByteReader in(bytes);
  if (in.get<uint32_t>() != kMagic)
    return Error{ErrorCode::kProtocol, "not a token of join_token(), or only a part of one"};
  if (const auto version = in.get<uint8_t>(); !in.failed() && version != kVersion) {
    return Error{ErrorCode::kMismatch,
                 "a token of version " + std::to_string(version) + ", where this process reads " +
                     std::to_string(kVersion) + ": install the same mooncake-backend everywhere"};
  }
  JoinToken token{.job = in.getString(JobIdentity::kMostJob)};
  const auto count = in.get<uint8_t>();
  for (int i = 0; i < count && !in.failed(); ++i) {
    const ByteView member = in.getBytes(JoinRequest::kMostEndpoint);
    token.members.emplace_back(member.begin(), member.end());
  }
  MOONCAKE_TRY(in.finish("join token"));
  if (token.members.empty() || token.members.size() > JoinToken::kMostMembers)
    return Error{ErrorCode::kProtocol,
                 "a join token of " + std::to_string(token.members.size()) + " members"};
  return token;
}

}  // namespace mooncake
