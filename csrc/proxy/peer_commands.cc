#include "proxy/peer_commands.h"

#include <algorithm>
#include <utility>

#include "engine/contract/channel.h"
#include "proxy/command_check.h"

namespace mooncake::proxy {

using kernels::ProxyCommand;
using kernels::ProxyEnd;
using Stage = Flight::Stage;

namespace {

// Of a put that carries bytes: it copies them if the wire does not take them at once.
constexpr uint64_t kSmall = uint64_t(16) << 10;
constexpr auto kRepeatAfter = std::chrono::milliseconds(200);
// Between two attempts to use a connection that has broken, or a wire that takes nothing.
constexpr auto kRenewEvery = std::chrono::milliseconds(5);
constexpr auto kFullPause = std::chrono::milliseconds(1);

}  // namespace

PeerCommands::PeerCommands(uint32_t ours, uint32_t number, std::shared_ptr<Peer> peer,
                           CommandRing ring, std::span<const LocalRegion> sources, Regions targets,
                           PeerLimits limits, Doorbell* bell)
    : ours_(ours),
      peer_(std::move(peer)),
      name_("rank " + std::to_string(ours) + ", proxy to rank " + std::to_string(number)),
      ring_(ring),
      sources_(sources),
      targets_(std::move(targets)),
      limits_(limits),
      flights_(PeerLimits::kMostUnderWay, bell),
      issued_(targets_.signalWords),
      underWay_(targets_.signalWords),
      seen_(targets_.signalWords),
      blockedIn_(targets_.signalWords),
      toAnnounce_(targets_.signalWords),
      reading_(bell) {}

Status PeerCommands::status() const {
  Lock lock(mutex_);
  return status_;
}

bool PeerCommands::drive(Clock::time_point now) {
  if (isEnded_) return false;
  if (peer_->disconnected) {
    end(ProxyEnd::kPeerLost,
        {ErrorCode::kPeerLost, name_ + ": the peer is lost (" + peer_->evidence.detail +
                                   "), and takes no more commands: go on without it"});
    return true;
  }
  if (isDropped_.load(std::memory_order_acquire)) {
    end(ProxyEnd::kPeerLost, {ErrorCode::kPeerLost, name_ + ": the other ranks go on without it, " +
                                                        "so it takes no more commands"});
    return true;
  }
  bool hasChanged = isBroken_ ? renew(now) : collect(now);
  if (!isEnded_ && !isBroken_) hasChanged |= confirm(now);
  if (!isEnded_) hasChanged |= takeCommands(now);
  if (!isEnded_ && !isBroken_) hasChanged |= begin(now);
  if (!isEnded_ && flights_.size() > 0 && now - flights_[0].begun > limits_.timeout) {
    const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(limits_.timeout);
    end(ProxyEnd::kTimeout,
        {ErrorCode::kTimeout, name_ + ": " + describe(flights_[0].command) +
                                  ", has not completed in " + std::to_string(limit.count()) +
                                  " ms: is the peer stopped? Go on without it, or raise timeout"});
    return true;
  }
  return hasChanged;
}

bool PeerCommands::hasNews() {
  if (isEnded_) return false;
  if (peer_->disconnected || isDropped_.load(std::memory_order_relaxed)) return true;
  if (isReading_ && reading_.finished()) return true;
  if (!isHeld_ && flights_.hasRoom() && ring_.hasNext()) return true;
  for (size_t i = 0; i < flights_.size(); ++i) {
    if (flights_[i].stage == Stage::kWriting && flights_[i].completion.finished()) return true;
  }
  return false;
}

void PeerCommands::end(ProxyEnd why, Error error) {
  if (std::exchange(isEnded_, true)) return;
  for (size_t i = 0; i < flights_.size(); ++i) {
    if (flights_[i].stage == Stage::kWriting) peer_->channel->cancel(&flights_[i].completion);
  }
  if (isReading_) peer_->channel->cancel(&reading_);
  {
    Lock lock(mutex_);
    status_ = std::move(error);
  }
  ring_.end(why);
}

// ---- from the ring to the wire

bool PeerCommands::takeCommands(Clock::time_point now) {
  bool hasTaken = false;
  while (flights_.hasRoom()) {
    if (!isHeld_) {
      if (!ring_.take(held_)) break;
      isHeld_ = hasTaken = true;
      if (const Status right = check(held_, sources_, targets_); !right.ok()) {
        end(ProxyEnd::kWrongCommand, {right.code(), name_ + ": " + right.error().message});
        return true;
      }
    }
    if (bytesUnderWay_ > 0 && bytesUnderWay_ + held_.bytes > limits_.bytesUnderWay) break;
    isHeld_ = false;
    Flight& flight = flights_.add();
    flight.command = held_;
    flight.begun = now;
    flight.stage = Stage::kDue;
    ++due_;
    bytesUnderWay_ += held_.bytes;
    if (!flight.hasSignal()) continue;
    flight.stamp = ++issued_[held_.signal];
    ++underWay_[held_.signal];
    ++signalled_;
  }
  if (hasTaken) ring_.publishTaken();
  return hasTaken;
}

// Returns whether one put may carry the bytes: wires keep doorbells at the start of a put's region.
bool PeerCommands::fitsPut(const ProxyCommand& command) const {
  return command.bytes <= kSmall && command.targetOffset >= sizeof(Doorbell) &&
         !sources_[command.sourceRegion].owner &&
         !targets_.regions[command.targetRegion].isOfDevice;
}

// Gives the wire the flights that are due.
bool PeerCommands::begin(Clock::time_point now) {
  if (due_ == 0 || now < pausedUntil_) return false;
  for (size_t i = 0; i < flights_.size() && due_ > 0 && !isBroken_; ++i) {
    Flight& flight = flights_[i];
    if (flight.stage != Stage::kDue) continue;
    const ProxyCommand& command = flight.command;
    const LocalRegion& source = sources_[command.sourceRegion];
    const auto bytes = source.memory.subspan(command.sourceOffset, command.bytes);
    const bool isAlone = flight.hasSignal() && underWay_[command.signal] == 1;
    if (command.bytes == 0 || (isAlone && fitsPut(command))) {
      if (!flight.hasSignal()) {
        finish(flight);
      } else if (!isAlone) {
        flight.stage = Stage::kWritten;
      } else if (putSignal(command.signal, flight.stamp, bytes, &command, now)) {
        flight.stage = Stage::kPut;
        flight.sent = now;
      } else {
        break;
      }
    } else {
      writes_.push_back({.region = targets_.regions[command.targetRegion].remote,
                         .offset = command.targetOffset,
                         .source = bytes,
                         .completion = &flight.completion,
                         .owner = source.owner});
      writing_.push_back(&flight);
      flight.stage = Stage::kWriting;
    }
    --due_;
  }
  return giveWrites(now);
}

bool PeerCommands::giveWrites(Clock::time_point now) {
  if (writes_.empty()) return false;
  const Status begun = isEnded_ ? Status(ErrorCode::kAborted, "")
                                : peer_->channel->write(std::span<const WriteRequest>(writes_));
  if (!begun.ok()) {
    for (Flight* const flight : writing_) flight->stage = Stage::kDue;
    due_ += writing_.size();
  }
  writes_.clear();
  writing_.clear();
  if (!begun.ok() && !isEnded_) onError(begun.code(), begun.error().message, now);
  return true;
}

// ---- from the wire to the ring

bool PeerCommands::collect(Clock::time_point now) {
  ++turn_;
  for (size_t i = 0; i < flights_.size(); ++i) {
    Flight& flight = flights_[i];
    if (flight.stage == Stage::kWriting && flight.completion.finished()) {
      const ErrorCode code = flight.completion.error.load();
      const std::string why = std::exchange(flight.completion.why, {});
      flight.completion.reset();
      if (code != ErrorCode::kOk) {
        flight.stage = Stage::kDue;
        ++due_;
        onError(code, describe(flight.command) + " failed: " + why, now);
        if (isEnded_) return true;
      } else if (flight.hasSignal()) {
        flight.stage = Stage::kWritten;
      } else {
        finish(flight);
      }
    }
    if (!flight.hasSignal()) {
      // The ring hears of the first ones only.
      if (flight.stage == Stage::kWriting && signalled_ == 0) break;
      continue;
    }
    const uint32_t word = flight.command.signal;
    if (flight.stage == Stage::kWritten && blockedIn_[word] != turn_) {
      if (toAnnounce_[word] == 0) announcing_.push_back(word);
      toAnnounce_[word] = flight.stamp;
      flight.stage = Stage::kAnnounced;
      flight.sent = now;
    } else if (flight.stage != Stage::kAnnounced && flight.stage != Stage::kDone) {
      blockedIn_[word] = turn_;
    }
  }
  announce(now);
  return popDone();
}

void PeerCommands::announce(Clock::time_point now) {
  for (const uint32_t word : announcing_) {
    const uint64_t stamp = std::exchange(toAnnounce_[word], 0);
    // If the wire does not take it, it is repeated later.
    if (!isEnded_ && !isBroken_) (void)putSignal(word, stamp, {}, nullptr, now);
  }
  announcing_.clear();
}

bool PeerCommands::popDone() {
  uint32_t count = 0;
  for (; flights_.size() > 0 && flights_[0].stage == Stage::kDone; ++count) {
    bytesUnderWay_ -= flights_[0].command.bytes;
    flights_.popFront();
  }
  if (count > 0) ring_.complete(count);
  return count > 0;
}

void PeerCommands::finish(Flight& flight) {
  flight.stage = Stage::kDone;
  if (!flight.hasSignal()) return;
  --underWay_[flight.command.signal];
  --signalled_;
}

// ---- signals

bool PeerCommands::putSignal(uint32_t word, uint64_t stamp, std::span<const std::byte> data,
                             const ProxyCommand* command, Clock::time_point now) {
  PutRequest request{.region = targets_.signals,
                     .offset = 0,
                     .data = data,
                     .signal = {targets_.wordsOf(ours_) + word * sizeof(uint64_t), stamp},
                     .signalRegion = targets_.signals};
  if (command && !data.empty()) {
    request.region = targets_.regions[command->targetRegion].remote;
    request.offset = command->targetOffset;
  }
  const Status begun = peer_->channel->put(request);
  if (!begun.ok()) onError(begun.code(), begun.error().message, now);
  return begun.ok();
}

bool PeerCommands::isArriving(const Flight& flight) {
  return flight.stage == Stage::kPut || flight.stage == Stage::kAnnounced;
}

// Returns whether the peer's word, as last read, counts the command.
bool PeerCommands::isUp(const Flight& flight) const {
  const uint64_t seen = seen_[flight.command.signal];
  return seen >= flight.stamp && seen <= issued_[flight.command.signal];
}

// Takes the words that were asked for, and asks for the words of signals that are on their way.
bool PeerCommands::confirm(Clock::time_point now) {
  bool hasChanged = false;
  if (isReading_) {
    if (!reading_.finished()) return false;
    isReading_ = false;
    const ErrorCode code = reading_.error.load();
    const std::string why = std::exchange(reading_.why, {});
    reading_.reset();
    if (code != ErrorCode::kOk) {
      onError(code, "its signals could not be read: " + why, now);
      return true;
    }
    for (size_t i = 0; i < flights_.size(); ++i) {
      if (isArriving(flights_[i]) && isUp(flights_[i])) finish(flights_[i]);
    }
    hasChanged = popDone();
  }
  repeatLate(now);
  uint32_t first = ~uint32_t(0), last = 0;
  for (size_t i = 0; i < flights_.size(); ++i) {
    if (!isArriving(flights_[i])) continue;
    first = std::min(first, flights_[i].command.signal);
    last = std::max(last, flights_[i].command.signal);
  }
  if (first <= last && !isBroken_ && !isEnded_) readWords(first, last + 1 - first, now);
  return hasChanged;
}

void PeerCommands::readWords(uint32_t first, size_t count, Clock::time_point now) {
  const Status begun =
      peer_->channel->get({.region = targets_.signals,
                           .offset = targets_.wordsOf(ours_) + first * sizeof(uint64_t),
                           .target = std::as_writable_bytes(std::span(seen_).subspan(first, count)),
                           .completion = &reading_});
  isReading_ = begun.ok();
  if (!begun.ok()) onError(begun.code(), begun.error().message, now);
}

// The connection may have broken and be made again without a call of ours that failed.
void PeerCommands::repeatLate(Clock::time_point now) {
  for (size_t i = 0; i < flights_.size() && !isBroken_ && !isEnded_; ++i) {
    Flight& flight = flights_[i];
    if (!isArriving(flight) || now - flight.sent < kRepeatAfter) continue;
    const ProxyCommand& command = flight.command;
    std::span<const std::byte> bytes;
    if (flight.stage == Stage::kPut)
      bytes = sources_[command.sourceRegion].memory.subspan(command.sourceOffset, command.bytes);
    flight.sent = now;
    (void)putSignal(command.signal, flight.stamp, bytes, &command, now);
  }
}

// ---- errors

void PeerCommands::onError(ErrorCode code, const std::string& why, Clock::time_point now) {
  if (code == ErrorCode::kPeerLost) {
    isBroken_ = true;
    pausedUntil_ = now;
  } else if (code == ErrorCode::kExhausted) {
    pausedUntil_ = now + kFullPause;
  } else {
    end(ProxyEnd::kFailed, {code, name_ + ": " + why + " (" + errorCodeName(code) +
                                      "): does the peer's proxy still exist? Build both anew"});
  }
}

// The connection has broken. Nothing of it lands any more once another one has answered.
bool PeerCommands::renew(Clock::time_point now) {
  for (size_t i = 0; i < flights_.size(); ++i) {
    if (flights_[i].stage == Stage::kWriting && !flights_[i].completion.finished()) return false;
  }
  if (isReading_) {
    if (!reading_.finished()) return false;
    isReading_ = false;
    const bool isBack = reading_.error.load() == ErrorCode::kOk && isProbing_;
    reading_.reset();
    isProbing_ = false;
    if (isBack) {
      isBroken_ = false;
      for (size_t i = 0; i < flights_.size(); ++i) {
        Flight& flight = flights_[i];
        if (isArriving(flight)) flight.sent = now - kRepeatAfter;
      }
      return true;
    }
    pausedUntil_ = now + kRenewEvery;
  }
  if (now < pausedUntil_) return false;
  readWords(0, seen_.size(), now);
  isProbing_ = isReading_;
  if (!isReading_ && !isEnded_) pausedUntil_ = now + kRenewEvery;
  return true;
}

}  // namespace mooncake::proxy
