#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include <ATen/core/Tensor.h>

#include "base/mutex.h"
#include "collectives/point_to_point.h"
#include "device/shared_pool.h"
#include "group/group.h"

namespace mooncake {

// Chooses the messages of a group whose copies are in memory of the device: messages to and from ranks
// of this host that map it. Such a message crosses no host memory, if both ends choose so; each end
// copes with the other choice. Thread-safe.
class PeerMessages {
 public:
  // Shorter messages are staged: they cost calls, not copies.
  static constexpr size_t kLeastBytes = size_t(64) << 10;
  static_assert(kLeastBytes > kCellPayload);

  // `name`: of the group, for the log.
  explicit PeerMessages(std::string name) : name_(std::move(name)) {}

  struct Place {
    std::shared_ptr<SharedPool> pool;
    SharedPool::Piece piece;
    MessageDevice device;
  };
  // Returns memory for the copy of a tensor; nullopt: the message is staged. A line of the log says
  // why, once for each cause. `peer`: may be any source, or no rank at all.
  std::optional<Place> find(Group& group, const at::Tensor& tensor, int peer, bool isSend);

 private:
  void tell(const std::string& what, const std::string& why);
  Status reaches(const Group& group, int peer) const;

  const std::string name_;
  Mutex mutex_;
  std::set<std::string> told_ GUARDED_BY(mutex_);
};

}  // namespace mooncake
