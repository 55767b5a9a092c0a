#include <algorithm>
#include <cstring>

#include "base/mutex.h"
#include "wires/nic/sim/sim_nic.h"

// Handles messages from other cards, and their accesses to memory here.
namespace mooncake {
namespace {

constexpr size_t kMostCarried = size_t(48) << 10;  // data in one message
// Time until a packet that found no receive buffer is offered again.
constexpr auto kAgain = std::chrono::microseconds(100);

}  // namespace

class SimNic::Memory final : public NicMemory {
 public:
  Memory(SimNic& nic, std::span<std::byte> memory, uint64_t key)
      : nic_(nic), memory_(memory), key_(key) {}
  ~Memory() override {
    Lock lock(nic_.mutex_);
    nic_.landUntil(Time::max());
    const auto gone = nic_.registered_.extract(key_);
    // Writes that have begun or are on their way may still land for a while.
    if (gone && !nic_.limits_.withdrawalStops)
      nic_.withdrawn_[key_] = {gone.mapped(), Clock::now() + 2 * nic_.options_.odds.lateness};
  }
  std::span<std::byte> memory() const override { return memory_; }
  NicKey key() const override { return {.key = key_, .base = 0}; }

 private:
  SimNic& nic_;
  const std::span<std::byte> memory_;
  const uint64_t key_;
};

Result<std::unique_ptr<NicMemory>> SimNic::registerMemory(std::span<std::byte> memory,
                                                          uint32_t access) {
  Lock lock(mutex_);
  const uint64_t key = ++lastNumber_ << 32 | dice_.below(UINT32_MAX);
  registered_[key] = {memory, access, options_.landsBehind && options_.landsBehind(memory.data())};
  return std::unique_ptr<NicMemory>(new Memory(*this, memory, key));
}

void SimNic::take(const In& in, Time now) {
  ByteReader reader(in.bytes);
  auto message = Message::decode(reader);
  if (!message || message->toLife != life_) return;
  const ByteView data = reader.getRaw(reader.left());
  message->from.host = in.from;
  switch (message->kind) {
    case Kind::kPacket:
      // No receive buffer is posted: the packet waits, as it would in the sending card.
      if (!deliver(data, now)) in_.emplace(now + kAgain, in);
      return;
    case Kind::kRead:
      return serveRead(in.from, *message, now);
    case Kind::kWrite:
      return serveWrite(in.from, *message, data, now);
    case Kind::kReadData: {
      const auto found = operations_.find(message->operation);
      if (found == operations_.end() || found->second.hasEnded) return;
      Operation& read = found->second;
      if (message->answer != Answer::kOk || message->length != read.target.size())
        return end(message->operation, NicError::kRefused, now + dice_.delay());
      if (!data.empty())
        std::memcpy(read.target.data() + message->position, data.data(), data.size());
      read.arrived += data.size();
      if (read.arrived < read.target.size()) return;
      if (!dice_.once(options_.odds.lost))
        end(message->operation, NicError::kNone, now + dice_.delay());
      return;
    }
    case Kind::kWritten: {
      const NicError how = message->answer == Answer::kOk ? NicError::kNone : NicError::kRefused;
      if (!dice_.once(options_.odds.lost)) end(message->operation, how, now + dice_.delay());
      return;
    }
  }
}

bool SimNic::deliver(ByteView packet, Time now) {
  if (receives_.empty()) return false;
  const Receive receive = receives_.front();
  receives_.pop_front();
  const size_t bytes = std::min(packet.size(), receive.buffer.bytes.size());
  if (bytes > 0) std::memcpy(receive.buffer.bytes.data(), packet.data(), bytes);
  completions_.emplace(
      now, NicCompletion{
               .kind = NicCompletion::Kind::kReceived, .bytes = bytes, .context = receive.context});
  return true;
}

std::optional<std::span<std::byte>> SimNic::reach(const Message& message, uint32_t right,
                                                  bool* landsBehind) {
  const Registered* found = nullptr;
  if (const auto at = registered_.find(message.key); at != registered_.end()) found = &at->second;
  std::erase_if(withdrawn_, [&](const auto& one) { return one.second.second < Clock::now(); });
  if (const auto at = withdrawn_.find(message.key); at != withdrawn_.end())
    found = &at->second.first;
  const bool isAllowed = found && (found->access & right) != 0 &&
                         message.offset <= found->memory.size() &&
                         message.length <= found->memory.size() - message.offset;
  if (!isAllowed) {
    ++refused_;
    return std::nullopt;
  }
  if (landsBehind) *landsBehind = found->landsBehind;
  return found->memory.subspan(message.offset, message.length);
}

void SimNic::landUntil(Time when) {
  while (!landings_.empty() && landings_.begin()->first <= when) {
    const auto due = landings_.extract(landings_.begin());
    std::memcpy(due.mapped().to, due.mapped().bytes.data(), due.mapped().bytes.size());
  }
}

void SimNic::reply(const Host& host, const Message& request, Message answer, ByteView data,
                   Time when) {
  answer.operation = request.operation;
  Out out{.to = {host, request.from.index, request.from.life},
          .message = answer,
          .owned = Bytes(data.begin(), data.end())};
  out_.emplace(when, std::move(out));
}

void SimNic::serveRead(const Host& from, const Message& request, Time now) {
  landUntil(Time::max());
  const auto memory = reach(request, static_cast<uint32_t>(NicAccess::kRemoteRead));
  if (!memory)
    return reply(from, request, {.kind = Kind::kReadData, .answer = Answer::kRefused}, {}, now);
  for (uint64_t position = 0; position < memory->size() || position == 0;) {
    const auto piece = memory->subspan(position, std::min(kMostCarried, memory->size() - position));
    reply(from, request, {.kind = Kind::kReadData, .length = memory->size(), .position = position},
          piece, now + dice_.delay());
    position += piece.size();
    if (piece.empty()) break;
  }
}

void SimNic::serveWrite(const Host& from, const Message& piece, ByteView data, Time now) {
  bool landsBehind = false;
  const auto memory = reach(piece, static_cast<uint32_t>(NicAccess::kRemoteWrite), &landsBehind);
  if (!memory)
    return reply(from, piece, {.kind = Kind::kWritten, .answer = Answer::kRefused}, {}, now);
  std::byte* const to = memory->data() + piece.position;
  if (landsBehind) {
    landings_.emplace(now + kLag, Landing{to, Bytes(data.begin(), data.end())});
  } else if (!data.empty()) {
    std::memcpy(to, data.data(), data.size());
  }
  uint64_t& arrived = writing_[{piece.from, piece.operation}];
  arrived += data.size();
  if (arrived < piece.length) return;
  writing_.erase({piece.from, piece.operation});
  reply(from, piece, {.kind = Kind::kWritten}, {}, now + dice_.delay());
}

}  // namespace mooncake
