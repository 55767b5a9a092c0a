#pragma once

#include "engine/memory/device_copies.h"
#include "wires/stream/ring.h"
#include "wires/stream/wire.h"

namespace mooncake {

// Payloads that have arrived for memory of devices: each lies in a pinned buffer first, and then
// lands by a copy. Answers wait here for the copies that they follow. Not thread-safe: the
// connection's receive lock guards it.
class Landings {
 public:
  // A get of ours, by its request, or a write of the peer, by its number on this connection.
  struct Transfer {
    bool isWrite = false;
    uint64_t number = 0;
    friend bool operator==(const Transfer&, const Transfer&) = default;
  };
  // The end of a transfer, due when the copies before it have ended. `request` names the write for
  // the peer, and the get for us.
  struct Ending {
    uint64_t request = 0;
    wire::AnswerStatus status = wire::AnswerStatus::kOk;
  };

  // Returns the buffer for the payload of the frame that arrives, the same one until land() or
  // drop(). Null: none is free.
  Result<std::byte*> buffer(const MemoryOwner& device);
  bool hasBuffer() const { return arriving_ != nullptr; }
  // The frame's payload is not wanted.
  void drop();
  // The frame's payload is complete: begins its copy. After an error nothing is under way.
  Status land(Transfer transfer, std::byte* target, size_t bytes, RegionTable::Use use,
              const Completion* completion);
  // Keeps the end of a transfer until its copies have ended. False: none is under way.
  bool keep(Transfer transfer, const Ending& ending);

  // A copy that has ended, in the order of arrival, and the end of its transfer if that was kept.
  struct Landed {
    Transfer transfer;
    std::optional<Ending> ending;
    std::optional<Error> failure;
  };
  std::optional<Landed> next();
  // Sets the status of an ending that is kept. False: none is.
  bool setEnding(Transfer transfer, wire::AnswerStatus status);

  DeviceCopies& copies() { return copies_; }
  // For a new connection. Copies under way go on, and nothing else is left of them.
  void clear();

 private:
  struct Landing {
    DeviceCopies::Copy* copy = nullptr;
    Transfer transfer;
    std::optional<Ending> ending;
  };

  DeviceCopies copies_;
  DeviceCopies::Copy* arriving_ = nullptr;
  Ring<Landing> landings_;
};

}  // namespace mooncake
