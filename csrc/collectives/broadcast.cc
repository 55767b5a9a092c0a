// Small: the data stands in the root's slot. One exchange, s bytes out of the root per rank that
// does not map it. Large: every rank fetches s bytes from the root's memory, then every rank
// signals to all that it has them.
//
// A root that dies in between is replaced. Every rank says in the header of the next attempt
// whether it holds the data. The lowest rank that does becomes the source.
#include <algorithm>
#include <cstring>

#include "collectives/collectives.h"
#include "collectives/fed_pieces.h"
#include "group/fetches.h"
#include "group/operation.h"

namespace mooncake {
namespace {

class Broadcast : public Algorithm {
 public:
  Broadcast(Group& group, Span data, int root)
      : data_(data), root_(root), hasData_(group.rank() == root || data.empty()) {}

 protected:
  // The rank that supplies the data in this attempt; -1: none. Valid once all ranks have begun.
  int source(Operation& op) const {
    if (op.takesPart(root_)) return root_;
    const auto holds = [&](int r) {
      return op.slot(r).payloadBytes > 0 || op.slot(r).input.bytes > 0;
    };
    const auto first = std::ranges::find_if(op.ranks(), holds);
    return first == op.ranks().end() ? (data_.empty() ? op.rank() : -1) : *first;
  }

  const Span data_;
  const int root_;
  bool hasData_;
};

class BroadcastEager final : public Broadcast {
 public:
  using Broadcast::Broadcast;

  Status publish(Operation& op) override {
    if (hasData_) op.write(op.payload(), data_);
    op.announceInput({});
    return op.begin(hasData_ ? data_.size() : 0);
  }
  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    const int from = source(op);
    if (from < 0) return op.agreeRootLost(root_);
    if (from != op.rank()) MOONCAKE_TRY(take(op, from));
    return op.commit();
  }
  void rollBack(Operation& op, Rollback rollback) override {
    if (rollback == Rollback::kAgain && !hasData_ && op.takesPart(root_) && op.hasBegun(root_))
      hasData_ = take(op, root_).ok();
  }

 private:
  Status take(Operation& op, int from) const {
    auto payload = op.payloadOf(from, data_.size());
    if (!payload.ok()) return payload.error();
    if (!data_.empty()) std::memcpy(data_.data(), *payload, data_.size());
    return {};
  }
};

class BroadcastRendezvous final : public Broadcast {
 public:
  using Broadcast::Broadcast;

  Status publish(Operation& op) override {
    op.announceInput({});
    if (hasData_) {
      auto added = op.group().engine().regions().add(data_.data(), data_.size(), kRemoteRead);
      if (!added.ok()) return added.error();
      region_ = std::move(*added);
      op.announceInput(region_.remote());
    }
    // Over messages the head travels with the announcement: the wire is busy while the receivers
    // ask for the rest.
    const bool mapped = op.group().window().fullyMapped();
    const Span head = data_.first(mapped ? 0 : op.group().eagerBytes());
    if (hasData_ && !mapped) std::memcpy(op.payload(), head.data(), head.size());
    MOONCAKE_TRY(op.begin(hasData_ ? head.size() : 0));
    MOONCAKE_TRY(op.awaitAllBegun());
    const int from = source(op);
    if (from < 0) return op.agreeRootLost(root_);
    if (hasData_) return {};

    auto payload = op.payloadOf(from, head.size());
    if (!payload.ok()) return payload.error();
    Fetches fetches(op);
    MOONCAKE_TRY(fetches.start(from, op.slot(from).input, head.size(), data_.subspan(head.size())));
    if (!mapped) std::memcpy(head.data(), *payload, head.size());
    MOONCAKE_TRY(fetches.await());
    hasData_ = true;
    return {};
  }
  Status complete(Operation& op) override { return op.commitDone(); }
  void rollBack(Operation&, Rollback) override { region_ = MemoryRegion(); }

 private:
  MemoryRegion region_;
};

Status broadcastPiece(Group& group, const Call& call, Span data, Deadline deadline) {
  Operation op(group, call, deadline);
  const size_t eager = group.window().fullyMapped() ? group.eagerBytes() : group.slotBytes();
  if (data.size() <= eager) {
    BroadcastEager eager(group, data, call.root);
    return op.run(eager);
  }
  BroadcastRendezvous rendezvous(group, data, call.root);
  return op.run(rendezvous);
}

}  // namespace

Status broadcast(Group& group, Span data, DType dtype, int root, Deadline deadline,
                 InputFeed* feed) {
  const Call call{.verb = Verb::kBroadcast,
                  .dtype = dtype,
                  .root = root,
                  .count = data.size() / dtypeSize(dtype)};
  if (!feed) return broadcastPiece(group, call, data, deadline);
  return runFed(group, call, *feed, data.size(), fedPieceBytes(data.size()), OnLoss::kGoOn,
                [&](const Call& each, size_t begin, size_t bytes) {
                  return broadcastPiece(group, each, data.subspan(begin, bytes), deadline);
                });
}

}  // namespace mooncake
