#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "collectives/point_to_point.h"
#include "group/group.h"

namespace mooncake {

// Memory that every rank of a group gives, each of a size of its own, for the others to put into.
// Any thread may call.
class RmaWindow {
 public:
  static constexpr size_t kMostDims = 16;
  using OnDone = PointToPoint::OnDone;

  // What a rank gives. `shape`: how its elements lie, for whoever maps it; at most kMostDims.
  struct Given {
    std::span<std::byte> memory;
    std::vector<int64_t> shape;
  };

  // Collective, one of the group's operations; all name the same type. The memory is written to
  // until the window is closed, here or by the destructor.
  static Result<std::unique_ptr<RmaWindow>> open(Group& group, PointToPoint& messages, Given given,
                                                 DType dtype, Deadline deadline);
  // Not after the messages have gone.
  ~RmaWindow();

  DType dtype() const { return dtype_; }
  // What a rank gave. Nothing of a rank that was gone when the window was opened.
  bool has(int rank) const { return parts_[rank].isThere; }
  uint64_t bytes(int rank) const { return parts_[rank].bytes; }
  const std::vector<int64_t>& shape(int rank) const { return parts_[rank].shape; }
  // Where load and store reach what another rank gave: it lies in that one's arena, which is mapped
  // here. Else empty. As long as the peer's channel.
  std::span<std::byte> mapped(int rank) const { return parts_[rank].mapped; }
  // What keeps that mapped for whoever uses it longer.
  const std::shared_ptr<const void>& mapping(int rank) const { return parts_[rank].mapping; }

  // Neither waits; the data belongs to the message until it is finished. The range must lie within
  // what the rank gave (kInvalidArgument).
  Result<std::shared_ptr<Message>> put(std::span<const std::byte> data, int to, uint64_t offset,
                                       Deadline deadline, OnDone onDone = nullptr,
                                       PointToPoint::Owner owner = nullptr);
  Result<std::shared_ptr<Message>> signal(int to, Deadline deadline, OnDone onDone = nullptr);
  std::shared_ptr<Message> awaitSignal(int from, Deadline deadline, OnDone onDone = nullptr);

  // Collective, as two operations of the group's. When it returns ok, everything that anybody has
  // put is in its place, and the memory is the caller's again. With an error the window stays open.
  Status close(Group& group, Deadline deadline);

 private:
  struct Part {
    bool isThere = false;
    uint32_t number = 0;  // of its window, at that rank
    uint64_t bytes = 0;
    std::vector<int64_t> shape;
    std::span<std::byte> mapped;
    std::shared_ptr<const void> mapping;
    uint64_t sent = 0;                               // puts and signals that it has, or will fetch
    std::vector<std::shared_ptr<Message>> underWay;  // puts and signals to it
  };

  RmaWindow(PointToPoint& messages, DType dtype, uint32_t number)
      : messages_(messages), dtype_(dtype), number_(number) {}
  Status take(Group& group, int rank, ByteView record);
  Result<std::shared_ptr<Message>> track(int to, std::shared_ptr<Message> message);
  static void count(Part& part);
  Status usable() const;
  Status awaitAllPuts(Group& group, Deadline deadline);
  Status awaitOwnPuts(Group& group, Deadline deadline);
  Status awaitOthers(Group& group, const std::vector<Bytes>& counts, Deadline deadline);

  PointToPoint& messages_;
  const DType dtype_;
  const uint32_t number_;
  std::vector<Part> parts_;
  std::mutex mutex_;  // guards `sent` and `underWay` of the parts, and isClosing_
  bool isClosing_ = false;
};

}  // namespace mooncake
