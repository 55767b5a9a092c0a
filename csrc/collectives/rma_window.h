#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/mutex.h"
#include "collectives/point_to_point.h"
#include "group/group.h"

namespace mooncake {

// Memory that every rank of a group contributes, each with its own size, for the other ranks to put
// into. Any thread may call.
class RmaWindow {
 public:
  static constexpr size_t kMostDims = 16;
  using OnDone = PointToPoint::OnDone;

  // The contribution of a rank. `shape`: the shape of its elements, for ranks that map them; at
  // most kMostDims dimensions.
  struct Given {
    std::span<std::byte> memory;
    std::vector<int64_t> shape;
  };

  // Collective, one of the group's operations; all ranks pass the same type. The memory is written
  // until the window is closed, by close() or by the destructor.
  static Result<std::unique_ptr<RmaWindow>> open(Group& group, PointToPoint& messages, Given given,
                                                 DType dtype, Deadline deadline);
  // Runs before `messages` is destroyed.
  ~RmaWindow();

  DType dtype() const { return dtype_; }
  // The contribution of a rank. A rank that was gone when the window was opened has none.
  bool has(int rank) const { return parts_[rank].isThere; }
  uint64_t bytes(int rank) const { return parts_[rank].bytes; }
  const std::vector<int64_t>& shape(int rank) const { return parts_[rank].shape; }
  // Another rank's contribution as mapped here; empty unless it lies in that rank's arena and the
  // arena is mapped. Valid as long as the peer's channel.
  std::span<std::byte> mapped(int rank) const { return parts_[rank].mapped; }
  // Keeps that mapping alive for a longer use.
  const std::shared_ptr<const void>& mapping(int rank) const { return parts_[rank].mapping; }

  // Neither put() nor signal() waits; the data belongs to the message until it is finished. The
  // range must lie within the contribution of rank `to` (kInvalidArgument).
  Result<std::shared_ptr<Message>> put(std::span<const std::byte> data, int to, uint64_t offset,
                                       Deadline deadline, OnDone onDone = nullptr,
                                       PointToPoint::Owner owner = nullptr);
  Result<std::shared_ptr<Message>> signal(int to, Deadline deadline, OnDone onDone = nullptr);
  std::shared_ptr<Message> awaitSignal(int from, Deadline deadline, OnDone onDone = nullptr);

  // Collective, two operations of the group. If it returns ok, all puts of all ranks are in place,
  // and the memory is the caller's again. With an error the window stays open.
  Status close(Group& group, Deadline deadline);

 private:
  struct Part {
    bool isThere = false;
    uint32_t number = 0;  // number of the window at that rank
    uint64_t bytes = 0;
    std::vector<int64_t> shape;
    std::span<std::byte> mapped;
    std::shared_ptr<const void> mapping;
    uint64_t sent = 0;  // puts and signals that the rank has or can fetch
    std::vector<std::shared_ptr<Message>> underWay;  // puts and signals to the rank
  };

  RmaWindow(PointToPoint& messages, DType dtype, uint32_t number)
      : messages_(messages), dtype_(dtype), number_(number) {}
  Status take(Group& group, int rank, ByteView record);
  Result<std::shared_ptr<Message>> track(int to, std::shared_ptr<Message> message) REQUIRES(mutex_);
  void count(Part& part) REQUIRES(mutex_);
  Status usable() const REQUIRES(mutex_);
  Status awaitAllPuts(Group& group, Deadline deadline);
  Status awaitOwnPuts(Group& group, Deadline deadline) EXCLUDES(mutex_);
  Status awaitOthers(Group& group, const std::vector<Bytes>& counts, Deadline deadline);

  PointToPoint& messages_;
  const DType dtype_;
  const uint32_t number_;
  std::vector<Part> parts_;
  Mutex mutex_;  // guards `sent` and `underWay` of the parts, too
  bool isClosing_ GUARDED_BY(mutex_) = false;
};

}  // namespace mooncake
