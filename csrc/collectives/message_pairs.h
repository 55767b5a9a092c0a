#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "base/bytes.h"
#include "collectives/mailbox_pair.h"
#include "collectives/message.h"
#include "group/group.h"

namespace mooncake {

// The group in which ranks met: its mailboxes, and the topic of its control messages. It lasts until
// no two of them use it any more, which may be long after the group.
struct Meeting {
  std::shared_ptr<Window> mailboxes;
  uint64_t topic = 0;
};

// A message that came before its receive.
struct EarlyMessage {
  uint64_t number;
  uint32_t tag;
  uint64_t bytes;
  RemoteRegion region;
  std::vector<std::byte> payload;

  bool isWhole() const { return region.bytes == 0; }  // its data came with it: it is not fetched
  size_t heldBytes() const { return sizeof(EarlyMessage) + payload.size(); }
};

// The messages between this rank and another one.
struct MessagePair {
  MessagePair(std::shared_ptr<const Meeting> meeting, int peer)
      : met(std::move(meeting)), mailboxes(*met->mailboxes, peer) {}

  // Marks a large message as fetched, unless it was given up.
  void noteAcknowledged(uint64_t number);

  std::shared_ptr<const Meeting> met;  // null: we have left
  MailboxPair mailboxes;
  bool isGone = false;           // the peer was gone when this round began
  bool isOut = false;            // and out of the view
  bool isClosed = false;         // nothing more is taken out of its mailbox
  std::optional<uint64_t> left;  // the peer has left the group: number of its messages to us
  bool wanted = false;           // a receive waits for a message of this rank
  bool sendsHeld = false;  // a send to this rank waits for a free cell, and so do the later ones
  std::vector<uint32_t> tagsHeld;  // tags of sends to this rank that wait for their data
  size_t earlyBytes = 0;
  std::list<EarlyMessage> early;  // by number
  // Large messages to the peer that are under way, by number. One that was given up is not here.
  std::map<uint64_t, Message*> announced;
  uint64_t reconnections = 0;  // number of times that its connection was made again
};

// The pairs of this rank with each rank of its group, and the places where they met. Ranks that two
// successive groups have in common keep their pairs.
//
// The caller serializes the calls (PointToPoint's lock).
class MessagePairs {
 public:
  explicit MessagePairs(Group& group);

  Group& group() const { return *group_; }
  int size() const { return int(pairs_.size()); }
  MessagePair& operator[](int rank) { return pairs_[size_t(rank)]; }
  const MessagePair& operator[](int rank) const { return pairs_[size_t(rank)]; }
  // The place where the pairs meet that begin with the current group. Null: no rank is new.
  const std::shared_ptr<const Meeting>& newest() const { return newest_; }

  // Goes on with the successor. `stays[r]`: rank r is the same process in both groups. The other
  // pairs begin anew. Returns the places that no pair uses any more; their topics must be closed.
  std::vector<std::shared_ptr<const Meeting>> move(Group& successor,
                                                   const std::vector<bool>& stays);
  // Returns all places that are in use.
  std::vector<std::shared_ptr<const Meeting>> places() const;
  // Lets go of all places. No pair may be used afterwards.
  std::vector<std::shared_ptr<const Meeting>> leave();

  // Puts acknowledgements that had no room before. Returns whether more are owed.
  bool payAcks();
  // Tells the other ranks that we have left, by control messages.
  void sayThatWeLeft();
  // Takes in such a message. It came to the topic of this place.
  void onLeft(const Meeting& place, const EngineId& from, ByteView message);

 private:
  Group* group_;
  std::vector<MessagePair> pairs_;  // by rank
  std::shared_ptr<const Meeting> newest_;
};

}  // namespace mooncake
