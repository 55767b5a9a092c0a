#include "group/line_words.h"

#include <algorithm>

#include "membership/roster.h"

namespace mooncake {
namespace {

// Wire form: u8 version  u8 kind  bool wishes  u32 series  u32 proposer  u32 number
//            u32 term  u32 count, each: u32 absent rank
//            u32 count, each: u32 rank  16 bytes id
//            u32 extent  u32 count, each: u32 retired rank
//            u32 count, each: i32 rank of the job
constexpr uint8_t kVersion = 4;

void putRanks(ByteWriter& out, const std::vector<int>& ranks) {
  out.put(uint32_t(ranks.size()));
  for (const int rank : ranks) out.put(uint32_t(rank));
}

// Returns whether they are in order and below `size`.
bool getRanks(ByteReader& in, int size, std::vector<int>& ranks) {
  bool isInOrder = true;
  const auto count = in.get<uint32_t>();
  for (uint32_t i = 0; i < count && !in.failed(); ++i) {
    const auto rank = in.get<uint32_t>();
    isInOrder = isInOrder && rank < uint32_t(size) && (i == 0 || int(rank) > ranks.back());
    ranks.push_back(int(rank));
  }
  return isInOrder;
}

// Returns whether there are `size`, or none, all of them ranks of a job or none yet.
bool getJobRanks(ByteReader& in, int size, std::vector<int>& ranks) {
  bool areRanks = true;
  const auto count = in.get<uint32_t>();
  for (uint32_t i = 0; i < count && !in.failed(); ++i) {
    const auto rank = in.get<int32_t>();
    areRanks = areRanks && rank >= Roster::kNobody && rank < JobRanks::kLimit;
    ranks.push_back(rank);
  }
  return areRanks && (count == 0 || count == uint32_t(size));
}

}  // namespace

bool Successor::hasNewcomerFor(int rank) const {
  return std::ranges::find(newcomers, rank, &Newcomer::rank) != newcomers.end();
}

bool Successor::isWithout(int rank) const { return std::ranges::binary_search(absent, rank); }

std::string Successor::identity(const std::string& line) const {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = line + "@" + std::to_string(series) + "#" + std::to_string(proposer) + "." +
                     std::to_string(number);
  for (const Newcomer& newcomer : newcomers) {
    text += "+" + std::to_string(newcomer.rank) + "=";
    for (const std::byte part : newcomer.id) {
      text += kDigits[unsigned(part) >> 4];
      text += kDigits[unsigned(part) & 15];
    }
  }
  return text;
}

Bytes encodeLineMessage(const LineMessage& message) {
  ByteWriter out;
  out.put(kVersion).put(static_cast<uint8_t>(message.kind)).put(message.wishes);
  out.put(message.successor.series).put(uint32_t(message.successor.proposer));
  out.put(message.successor.number).put(message.successor.term);
  putRanks(out, message.successor.absent);
  out.put(uint32_t(message.successor.newcomers.size()));
  for (const Newcomer& newcomer : message.successor.newcomers)
    out.put(uint32_t(newcomer.rank)).putRaw(newcomer.id);
  out.put(message.successor.extent);
  putRanks(out, message.successor.retired);
  out.put(uint32_t(message.successor.jobRanks.size()));
  for (const int rank : message.successor.jobRanks) out.put(int32_t(rank));
  return out.take();
}

Result<LineMessage> decodeLineMessage(ByteView bytes, int size) {
  ByteReader in(bytes);
  const auto version = in.get<uint8_t>();
  const auto kind = in.get<uint8_t>();
  LineMessage message{.kind = static_cast<LineMessage::Kind>(kind), .wishes = in.get<bool>()};
  message.successor.series = in.get<uint32_t>();
  const auto proposer = in.get<uint32_t>();
  message.successor.number = in.get<uint32_t>();
  message.successor.term = in.get<uint32_t>();
  bool isInOrder = getRanks(in, size, message.successor.absent);
  const auto count = in.get<uint32_t>();
  int64_t before = -1;
  for (uint32_t i = 0; i < count && !in.failed(); ++i) {
    const auto rank = in.get<uint32_t>();
    const ByteView id = in.getRaw(sizeof(EngineId));
    if (in.failed()) break;
    isInOrder = isInOrder && rank < uint32_t(size) && int64_t(rank) > before;
    before = rank;
    Newcomer& newcomer = message.successor.newcomers.emplace_back(Newcomer{.rank = int(rank)});
    std::copy(id.begin(), id.end(), newcomer.id.begin());
  }
  message.successor.extent = in.get<uint32_t>();
  isInOrder = getRanks(in, size, message.successor.retired) && isInOrder;
  const bool areRanks = getJobRanks(in, size, message.successor.jobRanks);
  const bool needsThem =
      message.kind == LineMessage::Kind::kPrepare || message.kind == LineMessage::Kind::kReady;
  MOONCAKE_TRY(in.finish("message of a group's line"));
  if (version != kVersion || kind < uint8_t(LineMessage::Kind::kReady) ||
      kind > uint8_t(LineMessage::Kind::kMoved) || proposer >= uint32_t(size) ||
      message.successor.extent > uint32_t(size) || !isInOrder || !areRanks ||
      (needsThem && message.successor.jobRanks.empty())) {
    return Error{ErrorCode::kProtocol, "a message of a group's line of version " +
                                           std::to_string(version) + " and kind " +
                                           std::to_string(kind) + " is not valid"};
  }
  message.successor.proposer = int(proposer);
  return message;
}

}  // namespace mooncake
