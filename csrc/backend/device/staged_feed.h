#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "collectives/input_feed.h"
#include "group/group.h"

namespace mooncake {

class Staging;

// The cut input of a staged operation. If it cannot be had, the group ends, because the other ranks
// wait for this one in the operation. Of one thread.
class StagedFeed final : public InputFeed {
 public:
  StagedFeed(std::shared_ptr<Staging> staging, Group& group)
      : staging_(std::move(staging)), group_(group) {}

  Status await(size_t bytes) override;
  Status restart() override;

 private:
  Status orFail(const std::function<Status()>& copy);

  const std::shared_ptr<Staging> staging_;
  Group& group_;
};

}  // namespace mooncake
