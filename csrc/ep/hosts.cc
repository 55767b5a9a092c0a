#include "ep/hosts.h"

#include <algorithm>
#include <map>

#include "group/operation.h"

namespace mooncake::ep {
namespace {

// Payload, wire form:  RankSet whom the rank maps, itself included  u64 bytes that it can send
struct Neighbours {
  RankSet mapped;
  uint64_t sendBytes = 0;
};

class Meet final : public Algorithm {
 public:
  explicit Meet(Neighbours ours) : ours_(std::move(ours)) {}

  Status publish(Operation& op) override {
    ByteWriter out;
    ours_.mapped.write(out);
    const Bytes words = out.put(ours_.sendBytes).take();
    std::ranges::copy(words, op.payload());
    return op.begin(words.size());
  }

  Status complete(Operation& op) override {
    MOONCAKE_TRY(op.awaitAllBegun());
    all.assign(size_t(op.size()), {});
    for (const int r : op.ranks()) {
      const Slot& slot = op.slot(r);
      const size_t bytes = std::min<size_t>(slot.payloadBytes, op.group().slotBytes());
      const Bytes copy(slot.payload, slot.payload + bytes);
      ByteReader in(copy);
      all[size_t(r)].mapped = RankSet::read(in);
      all[size_t(r)].sendBytes = in.get<uint64_t>();
      if (const Status whole = in.finish("neighbours"); !whole.ok()) {
        MOONCAKE_TRY(op.unlessFenced());
        return whole;
      }
    }
    return op.commit();
  }

  std::vector<Neighbours> all;  // by rank

 private:
  const Neighbours ours_;
};

}  // namespace

Result<Hosts> Hosts::meet(Group& group, uint64_t sendBytes, Deadline deadline) {
  Neighbours ours{.sendBytes = sendBytes};
  for (int r = 0; r < group.size(); ++r) {
    if (r == group.rank() || group.window().peerPtr(r)) ours.mapped.add(r);
  }
  Meet meet(std::move(ours));
  const Call call{.verb = Verb::kMeetHosts, .dtype = DType::kUInt64, .count = 1};
  MOONCAKE_TRY(Operation(group, call, deadline).run(meet));
  std::vector<RankSet> mapped;
  uint64_t least = sendBytes;
  for (const Neighbours& one : meet.all) {
    mapped.push_back(one.mapped);
    if (!one.mapped.empty()) least = std::min(least, one.sendBytes);
  }
  return Hosts(mapped, least);
}

Hosts::Hosts(const std::vector<RankSet>& mapped, uint64_t leastSendBytes)
    : leastSendBytes_(leastSendBytes) {
  RankSet there;
  for (size_t r = 0; r < mapped.size(); ++r) {
    if (!mapped[r].empty()) there.add(int(r));
  }
  for (size_t r = 0; r < mapped.size(); ++r) {
    // Ranks of a host say the same. One that says something else is by itself, and so is everybody
    // that maps it: all come to the same hosts.
    const RankSet ours = mapped[r] & there;
    bool isHost = !ours.empty();
    ours.forEach([&](int other) { isHost &= (mapped[size_t(other)] & there) == ours; });
    hostOf_.push_back(isHost ? ours.lowest() : int(r));
  }
}

std::vector<std::vector<int>> Hosts::split(const std::vector<int>& ranks) const {
  std::map<int, std::vector<int>> byHost;
  for (const int r : ranks) byHost[hostOf_.empty() ? r : hostOf_[size_t(r)]].push_back(r);
  std::vector<std::vector<int>> hosts;
  for (auto& [host, members] : byHost) hosts.push_back(std::move(members));
  std::ranges::sort(hosts, {}, [](const auto& members) { return members.front(); });
  return hosts;
}

}  // namespace mooncake::ep
