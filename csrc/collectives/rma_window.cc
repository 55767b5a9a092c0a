// Opening and closing are exchanges of slots, one record of a fixed length per rank. The code that
// moves data is in point_to_point.cc and one_sided.cc.
#include "collectives/rma_window.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "collectives/collectives.h"
#include "group/call_of_several.h"
#include "group/operation.h"

namespace mooncake {
namespace {

// A rank's record when a window is opened:
//   u32 number  u64 bytes  u64 offset in its arena (kNoOffset: elsewhere)  u32 dims  i64 sizes[16]
// When it is closed:  u64 puts and signals to rank 0, to rank 1, ...
constexpr uint64_t kNoOffset = ~uint64_t(0);
constexpr size_t kRecordBytes = 4 + 8 + 8 + 4 + 8 * RmaWindow::kMostDims;

// Gives every rank the records of all. The record of a rank that takes no part stays empty.
class Records final : public Algorithm {
 public:
  Records(const Bytes& mine, std::vector<Bytes>& all) : mine_(mine), all_(all) {}

  Status publish(Operation& op) override {
    std::memcpy(op.payload(), mine_.data(), mine_.size());
    return op.begin(mine_.size());
  }
  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    all_.assign(size_t(op.size()), {});
    for (const int r : op.ranks()) {
      auto payload = op.payloadOf(r, mine_.size());
      if (!payload.ok()) return payload.error();
      all_[size_t(r)].assign(*payload, *payload + mine_.size());
    }
    return op.commit();
  }

 private:
  const Bytes& mine_;
  std::vector<Bytes>& all_;
};

Status exchangeRecords(Group& group, const Call& call, const Bytes& mine, std::vector<Bytes>& all,
                       Deadline deadline) {
  Operation op(group, call, deadline);
  Records records(mine, all);
  return op.run(records);
}

uint64_t offsetInArena(const Arena& arena, std::span<std::byte> memory) {
  const auto start = reinterpret_cast<uintptr_t>(memory.data());
  const auto base = reinterpret_cast<uintptr_t>(arena.base());
  const bool isInside = start >= base && start - base <= arena.capacity() &&
                        memory.size() <= arena.capacity() - (start - base);
  return isInside ? start - base : kNoOffset;
}

Bytes recordOf(Group& group, uint32_t number, const RmaWindow::Given& given) {
  ByteWriter out;
  out.put(number)
      .put(uint64_t(given.memory.size()))
      .put(offsetInArena(group.engine().arena(), given.memory))
      .put(uint32_t(given.shape.size()));
  for (const int64_t size : given.shape) out.put(size);
  Bytes record = out.take();
  record.resize(kRecordBytes);
  return record;
}

}  // namespace

Result<std::unique_ptr<RmaWindow>> RmaWindow::open(Group& group, PointToPoint& messages,
                                                   Given given, DType dtype, Deadline deadline) {
  if (given.shape.size() > kMostDims)
    return Error{ErrorCode::kInvalidArgument,
                 "a window of more than " + std::to_string(kMostDims) + " dimensions"};
  // First, because a rank that has our record may put before this call returns.
  auto number = messages.openWindow(given.memory);
  if (!number.ok()) return number.error();
  std::unique_ptr<RmaWindow> window(new RmaWindow(messages, dtype, *number));
  std::vector<Bytes> records;
  MOONCAKE_TRY(exchangeRecords(group, {.verb = Verb::kRegisterWindow, .dtype = dtype},
                               recordOf(group, *number, given), records, deadline));
  window->parts_.resize(size_t(group.size()));
  for (int r = 0; r < group.size(); ++r) {
    if (!records[size_t(r)].empty()) MOONCAKE_TRY(window->take(group, r, records[size_t(r)]));
  }
  return window;
}

RmaWindow::~RmaWindow() { messages_.closeWindow(number_); }

Status RmaWindow::take(Group& group, int rank, ByteView record) {
  Part& part = parts_[size_t(rank)];
  ByteReader in(record);
  part.number = in.get<uint32_t>();
  part.bytes = in.get<uint64_t>();
  const auto offset = in.get<uint64_t>();
  const auto dims = in.get<uint32_t>();
  uint64_t elements = 1;
  bool isSane = dims <= kMostDims;
  for (uint32_t d = 0; isSane && d < dims; ++d) {
    part.shape.push_back(in.get<int64_t>());
    isSane = part.shape.back() >= 0 &&
             !__builtin_mul_overflow(elements, uint64_t(part.shape.back()), &elements);
  }
  uint64_t bytes = 0;
  if (!isSane || __builtin_mul_overflow(elements, dtypeSize(dtype_), &bytes) ||
      bytes != part.bytes) {
    return {ErrorCode::kProtocol,
            group.nameRank(rank) + " described an invalid window: its shape does not match its " +
                std::to_string(part.bytes) + " bytes"};
  }
  part.isThere = true;
  const auto& peer = group.window().peer(rank);
  const auto arena = peer ? peer->channel->peerArena() : std::span<std::byte>();
  if (offset == kNoOffset || arena.empty()) return {};
  if (offset > arena.size() || part.bytes > arena.size() - offset)
    return {ErrorCode::kProtocol, group.nameRank(rank) + " described a window outside its arena"};
  part.mapped = arena.subspan(offset, part.bytes);
  part.mapping = peer->channel->sharedPeerArena();
  return {};
}

Result<std::shared_ptr<Message>> RmaWindow::put(std::span<const std::byte> data, int to,
                                                uint64_t offset, Deadline deadline, OnDone onDone,
                                                PointToPoint::Owner owner) {
  Lock lock(mutex_);
  MOONCAKE_TRY(usable());
  const Part& part = parts_[size_t(to)];
  if (part.isThere && (offset > part.bytes || data.size() > part.bytes - offset)) {
    return Error{ErrorCode::kInvalidArgument, "put of " + std::to_string(data.size()) +
                                                  " bytes at byte " + std::to_string(offset) +
                                                  ": rank " + std::to_string(to) + " registered " +
                                                  std::to_string(part.bytes) + " bytes"};
  }
  return track(to, messages_.put(data, to, {part.number, number_}, offset, deadline,
                                 std::move(onDone), std::move(owner)));
}

Result<std::shared_ptr<Message>> RmaWindow::signal(int to, Deadline deadline, OnDone onDone) {
  Lock lock(mutex_);
  MOONCAKE_TRY(usable());
  return track(
      to, messages_.signal(to, {parts_[size_t(to)].number, number_}, deadline, std::move(onDone)));
}

std::shared_ptr<Message> RmaWindow::awaitSignal(int from, Deadline deadline, OnDone onDone) {
  return messages_.awaitSignal(from, number_, deadline, std::move(onDone));
}

Status RmaWindow::usable() const {
  if (!isClosing_) return {};
  return {ErrorCode::kInvalidArgument, "the window is just being deregistered"};
}

Result<std::shared_ptr<Message>> RmaWindow::track(int to, std::shared_ptr<Message> message) {
  Part& part = parts_[size_t(to)];
  count(part);
  part.underWay.push_back(message);
  return message;
}

// Forgets messages that have ended, and counts messages that the other side has or can fetch.
void RmaWindow::count(Part& part) {
  std::erase_if(part.underWay, [&](const std::shared_ptr<Message>& message) {
    if (!message->finished()) return false;
    part.sent += message->wasSent();
    return true;
  });
}

Status RmaWindow::close(Group& group, Deadline deadline) {
  {
    Lock lock(mutex_);
    isClosing_ = true;
  }
  const Status status = awaitAllPuts(group, deadline);
  if (status.ok()) {
    messages_.closeWindow(number_);
  } else {
    Lock lock(mutex_);
    isClosing_ = false;
  }
  return status;
}

Status RmaWindow::awaitAllPuts(Group& group, Deadline deadline) {
  MOONCAKE_TRY(awaitOwnPuts(group, deadline));
  CallOfSeveral call(group);
  ByteWriter mine;
  for (const Part& part : parts_) mine.put(part.sent);
  std::vector<Bytes> counts;
  MOONCAKE_TRY(
      exchangeRecords(group, {.verb = Verb::kDeregisterWindow}, mine.take(), counts, deadline));
  MOONCAKE_TRY(awaitOthers(group, counts, deadline));
  // A rank that returns may rely on its own puts being in place.
  call.last();
  return barrier(group, deadline);
}

// Waits until all our puts and signals have ended, well or not. Then `sent` of each part is final.
Status RmaWindow::awaitOwnPuts(Group& group, Deadline deadline) {
  for (int r = 0; r < group.size(); ++r) {
    std::vector<std::shared_ptr<Message>> underWay;
    {
      Lock lock(mutex_);
      underWay = parts_[size_t(r)].underWay;
    }
    for (const auto& message : underWay) {
      if (messages_.wait(*message, deadline)) continue;
      return {ErrorCode::kTimeout, "a " + std::string(message->operation()) + " to " +
                                       group.nameRank(r) +
                                       " is still under way; is that rank's process stopped?"};
    }
    Lock lock(mutex_);
    count(parts_[size_t(r)]);
  }
  return {};
}

// Waits until the puts and signals of the other ranks are applied. A lost rank's puts that had not
// ended are lost with it.
Status RmaWindow::awaitOthers(Group& group, const std::vector<Bytes>& counts, Deadline deadline) {
  for (int r = 0; r < group.size(); ++r) {
    if (r == group.rank() || counts[size_t(r)].empty()) continue;
    ByteReader in(counts[size_t(r)]);
    in.getRaw(8 * size_t(group.rank()));
    const auto applied = messages_.awaitApplied(r, number_, in.get<uint64_t>(), deadline);
    if (!messages_.wait(*applied, deadline))
      return {ErrorCode::kTimeout, "some puts of " + group.nameRank(r) + " have not arrived"};
    if (!applied->status().ok() && applied->status().code() != ErrorCode::kPeerLost)
      return applied->status();
  }
  return {};
}

}  // namespace mooncake
