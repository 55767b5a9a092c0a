#pragma once

#include <cstdint>

#include "base/result.h"
#include "collectives/message_pairs.h"
#include "collectives/one_sided.h"

namespace mooncake {

// Messages between our mailboxes and their receives: takes them out of a mailbox, and keeps them by
// pair until a receive comes. Puts and signals go on to OneSided.
//
// The caller serializes the calls (PointToPoint's lock).
class EarlyMessages {
 public:
  EarlyMessages(MessagePairs& pairs, OneSided& oneSided) : pairs_(pairs), oneSided_(oneSided) {}

  // Takes the messages that have arrived from a rank out of its mailbox, as long as there is room for
  // more here. kProtocol: a message does not decode, and stays in its cell.
  Status takeIn(int from);
  // True if the rank has left the group and all that it sent has been taken in here. A put may be
  // fetched later than the messages after it are taken.
  bool hasSentAll(int rank) const;

  // Returns the oldest message of the rank with this tag. Null: none waits. Valid until the next
  // call.
  const EarlyMessage* find(int from, uint32_t tag) const;
  // Hands that message to a receive. It must be there.
  EarlyMessage take(int from, uint32_t tag);
  // A receive did not get the message that it took: the next one may.
  void putBack(int from, EarlyMessage message);

 private:
  bool takeOne(int from, const MailboxCell& cell);

  MessagePairs& pairs_;
  OneSided& oneSided_;
};

}  // namespace mooncake
