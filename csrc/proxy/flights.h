#pragma once

#include <cstdint>
#include <deque>

#include "base/deadline.h"
#include "engine/contract/transfer.h"
#include "kernels/proxy/command.h"

namespace mooncake::proxy {

// A command that the host has taken and that has not completed.
struct Flight {
  enum class Stage : uint8_t {
    kDue,        // to be given to the wire
    kPut,        // its bytes and its signal are on their way in one put
    kWriting,    // its bytes are on their way
    kWritten,    // its bytes have arrived, its signal may not leave yet
    kAnnounced,  // its signal is on its way
    kDone
  };
  explicit Flight(Doorbell* bell) : completion(bell) {}

  Stage stage = Stage::kDone;
  kernels::ProxyCommand command{};
  uint64_t stamp = 0;       // the signal word's value once this command has arrived
  Clock::time_point begun;  // when it was taken
  Clock::time_point sent;   // when its put or its signal last left
  Completion completion;    // of the write

  bool hasSignal() const { return command.signal != kernels::kNoSignal; }
};

// The flights of one peer, in the order of their commands. Memory is allocated once.
class Flights {
 public:
  Flights(size_t most, Doorbell* bell) {
    for (size_t i = 0; i < most; ++i) all_.emplace_back(bell);
  }

  size_t size() const { return count_; }
  // Returns whether flights may be added. Once there is no room, a lot of them has to end first:
  // the wire takes several at once more cheaply than one by one.
  bool hasRoom() {
    if (count_ == all_.size()) isFilling_ = false;
    if (count_ + kLot <= all_.size()) isFilling_ = true;
    return isFilling_;
  }
  Flight& operator[](size_t i) { return all_[(first_ + i) % all_.size()]; }
  Flight& add() { return (*this)[count_++]; }
  void popFront() {
    first_ = (first_ + 1) % all_.size();
    --count_;
  }

 private:
  static constexpr size_t kLot = 32;

  std::deque<Flight> all_;  // does not move
  bool isFilling_ = true;
  size_t first_ = 0;
  size_t count_ = 0;
};

}  // namespace mooncake::proxy
