#include "ep/hosts.h"

#include <algorithm>
#include <map>
#include <numeric>

#include "group/operation.h"

namespace mooncake::ep {
namespace {

// Payload, wire form:  u8 kind, then
//   kMemory:  GroupRanks mapped  u64 send bytes  region as everywhere: u64 address, bytes, key
//   kError:   string of the error (<= 1024)
enum class Kind : uint8_t { kMemory = 0, kError };
constexpr size_t kMostText = 1024;

class Meet final : public Algorithm {
 public:
  explicit Meet(Result<Hosts::Memory> ours) : ours_(std::move(ours)) {}

  Status publish(Operation& op) override {
    ByteWriter out;
    if (ours_.ok()) {
      out.put(static_cast<uint8_t>(Kind::kMemory));
      ours_->mapped.write(out);
      const RemoteRegion& region = ours_->region;
      out.put(ours_->sendBytes).put(region.address).put(region.bytes).put(region.key);
    } else {
      out.put(static_cast<uint8_t>(Kind::kError))
          .putString(ours_.error().message.substr(0, kMostText));
    }
    const Bytes words = out.take();
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
      const bool hasFailed = static_cast<Kind>(in.get<uint8_t>()) == Kind::kError;
      const std::string why = hasFailed ? in.getString(kMostText) : std::string();
      if (hasFailed && in.finish("the error of a rank's buffer").ok())
        return op.agree(
            {ErrorCode::kExhausted, op.group().nameRank(r) + " could not make its Buffer: " + why});
      Hosts::Memory& its = all[size_t(r)];
      its.mapped = GroupRanks::read(in);
      its.sendBytes = in.get<uint64_t>();
      its.region.address = in.get<uint64_t>();
      its.region.bytes = in.get<uint64_t>();
      its.region.key = in.get<uint64_t>();
      if (const Status whole = in.finish("the description of a rank's buffer"); !whole.ok()) {
        MOONCAKE_TRY(op.unlessFenced());
        return whole;
      }
    }
    return op.commit();
  }

  std::vector<Hosts::Memory> all;  // by rank

 private:
  const Result<Hosts::Memory> ours_;
};

}  // namespace

Result<Hosts> Hosts::meet(Group& group, Result<Memory> ours, Deadline deadline) {
  for (int r = 0; ours.ok() && r < group.size(); ++r) {
    if (r == group.rank() || group.window().peerPtr(r)) ours->mapped.add(r);
  }
  Meet meet(std::move(ours));
  const Call call{.verb = Verb::kMeetHosts, .dtype = DType::kUInt64, .count = 1};
  MOONCAKE_TRY(Operation(group, call, deadline).run(meet));
  return Hosts(std::move(meet.all));
}

Hosts::Hosts(std::vector<Memory> all) : all_(std::move(all)), leastSendBytes_(~uint64_t(0)) {
  GroupRanks there;
  for (size_t r = 0; r < all_.size(); ++r) {
    if (all_[r].mapped.empty()) continue;
    there.add(int(r));
    leastSendBytes_ = std::min(leastSendBytes_, all_[r].sendBytes);
  }
  for (size_t r = 0; r < all_.size(); ++r) {
    // Ranks of one host report the same set. A rank that reports another set is a host of its own,
    // and so is every rank that maps it. So all ranks compute the same hosts.
    const GroupRanks ours = all_[r].mapped & there;
    bool isHost = !ours.empty();
    ours.forEach([&](int other) { isHost &= (all_[size_t(other)].mapped & there) == ours; });
    hostOf_.push_back(isHost ? ours.lowest() : int(r));
  }
  std::vector<int> ranks(all_.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  table_ = std::make_shared<const HostTable>(split(ranks));
}

std::vector<std::vector<int>> Hosts::split(const std::vector<int>& ranks) const {
  std::map<int, std::vector<int>> byHost;
  for (const int r : ranks) byHost[hostOf_[size_t(r)]].push_back(r);
  std::vector<std::vector<int>> hosts;
  for (auto& [host, members] : byHost) hosts.push_back(std::move(members));
  std::ranges::sort(hosts, {}, [](const auto& members) { return members.front(); });
  return hosts;
}

std::shared_ptr<const HostTable> Hosts::tableOf(const std::vector<int>& ranks) const {
  if (ranks.size() == all_.size()) return table_;
  return std::make_shared<const HostTable>(split(ranks));
}

}  // namespace mooncake::ep
