#include "membership/join_messages.h"

#include <algorithm>

namespace mooncake {

// Wire form, little-endian:  u16 version  u8 kind  then
//   JOIN, CONNECTED  string job (<= 128)  string mode (<= 32)  u64 options  u16 rank  u16 size
//                    u32 process  string host (<= 255)  bytes endpoint (<= 8192)
//                    CONNECTED only: u32 number and u32 digest of the term  u64 epoch
//   REFUSED          u8 reason  string text (<= 1024)
//   ROSTER           u32 number  u64 epoch  u64 viewEpoch  u16 size  u16 first  u16 count
//                    for each: bool isFilled, if so: id[16]  u32 since  bool isActive
//                    bytes endpoint (<= 8192)
//   MEET             u16 rank  bytes endpoint (<= 8192)
namespace {

constexpr uint16_t kVersion = 1;
enum class Kind : uint8_t { kJoin = 1, kConnected, kRefused, kRoster, kMeet };
constexpr size_t kMostPart = size_t(48) << 10;  // of a ROSTER

ByteWriter begin(Kind kind) {
  ByteWriter out;
  out.put(kVersion).put(static_cast<uint8_t>(kind));
  return out;
}

Bytes encode(const JoinRequest& request) {
  ByteWriter out = begin(request.connected ? Kind::kConnected : Kind::kJoin);
  out.putString(request.identity.job).putString(request.identity.mode);
  out.put(request.identity.options);
  out.put(static_cast<uint16_t>(request.rank)).put(static_cast<uint16_t>(request.size));
  out.put(request.process).putString(request.host).putBytes(request.endpoint);
  if (request.connected) {
    out.put(request.connected->term.number).put(request.connected->term.digest);
    out.put(request.connected->epoch);
  }
  return out.take();
}

Bytes encode(const JoinRefusal& refusal) {
  ByteWriter out = begin(Kind::kRefused);
  const std::string_view text(refusal.text);
  out.put(static_cast<uint8_t>(refusal.reason));
  return out.putString(text.substr(0, JoinRefusal::kMostText)).take();
}

void put(ByteWriter& out, const std::optional<RosterPart::Seat>& seat) {
  out.put(seat.has_value());
  if (!seat) return;
  out.putRaw(seat->holder.id).put(seat->holder.since).put(seat->isActive);
  out.putBytes(seat->endpoint);
}

Bytes encode(const RosterPart& part) {
  ByteWriter out = begin(Kind::kRoster);
  out.put(part.number).put(part.epoch).put(part.viewEpoch);
  out.put(static_cast<uint16_t>(part.size)).put(static_cast<uint16_t>(part.first));
  out.put(static_cast<uint16_t>(part.seats.size()));
  for (const auto& seat : part.seats) put(out, seat);
  return out.take();
}

Bytes encode(const JoinMeeting& meeting) {
  ByteWriter out = begin(Kind::kMeet);
  return out.put(static_cast<uint16_t>(meeting.rank)).putBytes(meeting.endpoint).take();
}

Bytes readBytes(ByteReader& in, size_t most) {
  const ByteView raw = in.getBytes(most);
  return {raw.begin(), raw.end()};
}

JoinRequest readRequest(ByteReader& in, bool isConnected) {
  JoinRequest request;
  request.identity.job = in.getString(JobIdentity::kMostJob);
  request.identity.mode = in.getString(JobIdentity::kMostMode);
  request.identity.options = in.get<uint64_t>();
  request.rank = in.get<uint16_t>();
  request.size = in.get<uint16_t>();
  request.process = in.get<uint32_t>();
  request.host = in.getString(JoinRequest::kMostHost);
  request.endpoint = readBytes(in, JoinRequest::kMostEndpoint);
  if (isConnected) {
    auto& connected = *(request.connected = JoinRequest::Connected{});
    connected.term.number = in.get<uint32_t>();
    connected.term.digest = in.get<uint32_t>();
    connected.epoch = in.get<uint64_t>();
  }
  return request;
}

JoinRefusal readRefusal(ByteReader& in) {
  const auto reason = static_cast<JoinRefusal::Reason>(in.get<uint8_t>());
  return {reason, in.getString(JoinRefusal::kMostText)};
}

RosterPart readRoster(ByteReader& in) {
  RosterPart part;
  part.number = in.get<uint32_t>();
  part.epoch = in.get<uint64_t>();
  part.viewEpoch = in.get<uint64_t>();
  part.size = in.get<uint16_t>();
  part.first = in.get<uint16_t>();
  for (int left = in.get<uint16_t>(); left > 0 && !in.failed(); --left) {
    auto& seat = part.seats.emplace_back();
    if (!in.get<bool>()) continue;
    seat = RosterPart::Seat{};
    std::ranges::copy(in.getRaw(seat->holder.id.size()), seat->holder.id.begin());
    seat->holder.since = in.get<uint32_t>();
    seat->isActive = in.get<bool>();
    seat->endpoint = readBytes(in, JoinRequest::kMostEndpoint);
  }
  return part;
}

bool isConsistent(const JoinRequest& request) {
  return request.size > 0 && request.size <= JobRanks::kLimit && !request.endpoint.empty();
}

bool isConsistent(const JoinMeeting& meeting) {
  return meeting.rank < JobRanks::kLimit && !meeting.endpoint.empty();
}

bool isConsistent(const JoinRefusal& refusal) {
  return refusal.reason >= JoinRefusal::Reason::kVersion &&
         refusal.reason <= JoinRefusal::Reason::kClosed;
}

bool isConsistent(const RosterPart& part) {
  return part.size <= JobRanks::kLimit && !part.seats.empty() && part.epoch > 0 &&
         part.viewEpoch >= part.epoch &&
         part.first + static_cast<int>(part.seats.size()) <= part.size;
}

}  // namespace

bool JoinRefusal::isForNow() const {
  return reason == Reason::kHeld || reason == Reason::kAsked || reason == Reason::kBusy ||
         reason == Reason::kOver;
}

Bytes encodeJoinMessage(const JoinMessage& message) {
  return std::visit([](const auto& one) { return encode(one); }, message);
}

Result<JoinMessage> decodeJoinMessage(ByteView bytes) {
  ByteReader in(bytes);
  const auto version = in.get<uint16_t>();
  if (!in.failed() && version != kVersion) {
    return Error{ErrorCode::kMismatch, "the peer joins jobs in version " + std::to_string(version) +
                                           ", this one in version " + std::to_string(kVersion) +
                                           ": install the same mooncake-backend everywhere"};
  }
  const auto kind = static_cast<Kind>(in.get<uint8_t>());
  JoinMessage message;
  switch (kind) {
    case Kind::kJoin:
    case Kind::kConnected:
      message = readRequest(in, kind == Kind::kConnected);
      break;
    case Kind::kRefused:
      message = readRefusal(in);
      break;
    case Kind::kRoster:
      message = readRoster(in);
      break;
    case Kind::kMeet: {
      const int rank = in.get<uint16_t>();
      message = JoinMeeting{rank, readBytes(in, JoinRequest::kMostEndpoint)};
      break;
    }
    default:
      return Error{ErrorCode::kProtocol, "no such message about joining a job"};
  }
  MOONCAKE_TRY(in.finish("message about joining a job"));
  if (!std::visit([](const auto& one) { return isConsistent(one); }, message))
    return Error{ErrorCode::kProtocol, "a message about joining a job does not make sense"};
  return message;
}

std::vector<RosterPart> splitRoster(const Term& term, const View& view,
                                    const std::vector<Bytes>& endpoints) {
  const RosterPart empty{
      .number = term.number, .epoch = term.epoch, .viewEpoch = view.epoch, .size = term.size()};
  std::vector<RosterPart> parts;
  size_t bytes = 0;
  for (int rank = 0; rank < term.size(); ++rank) {
    const auto& holder = term.holders[size_t(rank)];
    std::optional<RosterPart::Seat> seat;
    if (holder) {
      const bool isActive = view.active.contains(rank);
      seat = {*holder, isActive, isActive ? endpoints[size_t(rank)] : Bytes()};
    }
    ByteWriter form;
    put(form, seat);
    if (parts.empty() || bytes + form.bytes().size() > kMostPart) {
      parts.push_back(empty);
      parts.back().first = rank;
      bytes = 0;
    }
    bytes += form.bytes().size();
    parts.back().seats.push_back(std::move(seat));
  }
  return parts;
}

}  // namespace mooncake
