#pragma once

#include <functional>
#include <memory>

#include "base/deadline.h"
#include "wires/cards/rail.h"

namespace mooncake {

// Closes the card of one rail when that is asked for, and opens it anew at another address. On the
// rail's polling thread.
class CardRenewal {
 public:
  // Opens the card of a rail once more.
  using Reopen = std::function<Result<std::unique_ptr<Nic>>(size_t rail)>;

  // `sending` has the buffers of packets that leave. Without `reopen` a closed card stays closed.
  CardRenewal(Rail& rail, RegisteredPool& sending, PacketSinks& sinks, const Reopen& reopen)
      : rail_(rail), sending_(sending), sinks_(sinks), reopen_(reopen) {}

  // Returns true if the rail has another card since the last call.
  bool renewWhereDue();
  // Closes the card, and ends the operations that it had. Threads that wait for the end of the
  // generation go on before that, as the closed card moves nothing.
  void close();

 private:
  void endAll();
  bool reopen();

  Rail& rail_;
  RegisteredPool& sending_;
  PacketSinks& sinks_;
  const Reopen& reopen_;
  Clock::time_point reopenAt_;
};

}  // namespace mooncake
