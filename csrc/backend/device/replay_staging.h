#pragma once

#include <memory>

#include "backend/device/graph_staging.h"
#include "base/mutex.h"

namespace mooncake {

// An operation of a graph, in one replay of it. The replay waits until this is given back, abandoned
// or destroyed.
class ReplayStaging final : public Staging {
 public:
  ReplayStaging(std::shared_ptr<GraphStaging> graph, std::chrono::milliseconds limit);
  ~ReplayStaging() override { ReplayStaging::abandon(); }

  void mark() override {}
  Mode mode() const override { return Mode::kReplays; }
  bool isOrdered() const override { return true; }
  Status fetch(Group& group) override;
  Status awaitInput(Group& group, size_t bytes) const override {
    return graph_->awaitInput(group, bytes);
  }
  Status fetchAgain(Group& group) override { return graph_->fetchAgain(group); }
  void giveBack() override;
  // The replay copies the outputs in any case, so the host fetches their present contents first. If
  // the device fails, the outputs are undefined.
  void abandon() override;
  // The rest is for works, which an operation of a graph does not have.
  bool isOver() const override { return true; }
  void block() override {}
  void synchronize() const override {}

 private:
  const std::shared_ptr<GraphStaging> graph_;
  Mutex mutex_;
  bool isEnded_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake
