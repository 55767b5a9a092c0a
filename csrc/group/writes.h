#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <utility>

#include "base/deadline.h"
#include "base/result.h"
#include "engine/contract/transfer.h"
#include "engine/memory/region_table.h"

namespace mooncake {

class Operation;

// Writes data of one operation by cards, without a copy, into memory that ranks have announced.
// Like Operation::put(), but the data must not change until it has been written. Cards keep no
// order, so an attempt leaves none of its writes under way: Algorithm::stop() calls end().
class Writes {
 public:
  explicit Writes(Operation& op) : op_(op) {}
  ~Writes() { end(); }
  Writes(const Writes&) = delete;
  Writes& operator=(const Writes&) = delete;

  // Requires Window::hasCards(). The word is stamped when all data has arrived.
  Status start(int to, const RemoteRegion& region, uint64_t offset, std::span<const std::byte> data,
               size_t word);
  // Does nothing more if all writes have landed. Otherwise waits for them 100 ms, and then until
  // the operation's deadline, `failure_timeout` at most. If ranks can be skipped, ranks that
  // have not begun get the 100 ms only. Then cancels the rest, and waits until their targets
  // confirm that no part of them comes late. A silent target is lost after `failure_timeout`, which
  // ends the wait. If a target lives and has not confirmed after ten failure timeouts, the group
  // fails.
  void end();

 private:
  struct Target {
    Target(const RemoteRegion& region, Doorbell* bell) : region(region), completion(bell) {}
    bool hasLanded() const {
      return completion.finished() &&
             completion.error.load(std::memory_order_acquire) == ErrorCode::kOk;
    }
    RemoteRegion region;
    Completion completion;
  };

  void giveUp();
  template <typename IsOver>
  void wait(Deadline deadline, const IsOver& isOver) const;

  Operation& op_;
  std::map<std::pair<int, uint64_t>, Target> targets_;  // by rank and region
};

}  // namespace mooncake
