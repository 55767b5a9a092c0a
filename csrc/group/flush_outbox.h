#pragma once

#include <functional>
#include <mutex>
#include <string>
#include <variant>
#include <vector>

#include "group/flush_owner.h"
#include "membership/membership.h"

namespace mooncake {

// What an agent has to tell and to give: what takes longer than an assignment. Done without the
// agent's lock, in the order in which it was asked for: while one thread is at it, the others leave
// theirs to it. So a caller never waits for the loop's system calls. The agent's lock guards it.
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
  using Due = std::variant<Letter, Part, std::string>;  // a string: for the log

  FlushOutbox(FlushOwner& owner, Membership& membership, const std::vector<int>& jobRanks,
              uint64_t topic)
      : owner_(owner), membership_(membership), jobRanks_(jobRanks), topic_(topic) {}

  void add(Due due) { due_.push_back(std::move(due)); }
  // Lets go of the lock meanwhile.
  void carryOut(std::unique_lock<std::mutex>& lock);
  // The farewells that the engine did not take go once more. True: there is nothing to do.
  bool sendAgain();

 private:
  std::vector<int> perform(const Due& due);

  FlushOwner& owner_;
  Membership& membership_;
  const std::vector<int>& jobRanks_;  // of the members
  const uint64_t topic_;
  std::vector<Due> due_;
  bool isActing_ = false;       // a thread does what was due
  std::vector<Letter> unsent_;  // farewells that the engine did not take
};

}  // namespace mooncake
