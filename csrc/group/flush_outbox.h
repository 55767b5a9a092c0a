#pragma once

#include <functional>
#include <string>
#include <variant>
#include <vector>

#include "base/mutex.h"
#include "group/flush_owner.h"
#include "membership/flush.h"
#include "membership/membership.h"

namespace mooncake {

// Messages, slot copies and log lines that an agent has to send. They are sent in order, without
// the agent's lock. While one thread sends, other threads leave their entries to it. So a caller
// never waits for the loop's system calls. The agent's lock guards this object.
class FlushOutbox {
 public:
  struct Letter {
    std::vector<int> to;
    Bytes message;
    bool isFarewell = false;
  };
  struct Part {
    int to;
    SlotCopy copy;
  };
  // A string: for the log. A close: the owner learns that the series has ended.
  using Due = std::variant<Letter, Part, std::string, SeriesClose>;

  FlushOutbox(FlushOwner& owner, Membership& membership, const Roster& roster,
              const std::vector<int>& jobRanks, uint64_t topic)
      : owner_(owner),
        membership_(membership),
        roster_(roster),
        jobRanks_(jobRanks),
        topic_(topic) {}

  void add(Due due) { due_.push_back(std::move(due)); }
  // Has the engine repeat these messages when connections to these ranks are made again later. For
  // an agent that ends.
  void leave(const std::vector<int>& to, const std::vector<FlushMessage>& lastWords);
  // Sends all entries, unless another thread is sending. Releases the lock meanwhile.
  void carryOut(Mutex& mutex) REQUIRES(mutex);
  // Queues again the farewells that the engine did not take. True: there was nothing left to send.
  bool sendAgain();

 private:
  std::vector<int> perform(const Due& due);

  FlushOwner& owner_;
  Membership& membership_;
  const Roster& roster_;
  const std::vector<int>& jobRanks_;  // global ranks of the members
  const uint64_t topic_;
  std::vector<Due> due_;
  bool isActing_ = false;       // a thread is sending
  std::vector<Letter> unsent_;  // farewells that the engine did not take
};

}  // namespace mooncake
