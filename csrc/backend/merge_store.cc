#include "backend/merge_store.h"

#include <algorithm>

#include "base/rank_list.h"

namespace mooncake {
namespace {

// The list of a rank, wire form:
//   u32 version  u32 members  { id  string lost (<= 512) } * members
// The first member is the rank itself.
constexpr uint32_t kVersion = 1;
constexpr uint32_t kMostMembers = 4096;
constexpr size_t kMostLost = 512;

// Interval between two looks at the lists of the other ranks.
constexpr auto kLook = std::chrono::milliseconds(300);

std::string keyOf(int rank) { return "mooncake/merge/" + std::to_string(rank); }

Bytes encode(const std::vector<MergeMember>& members) {
  ByteWriter out;
  out.put(kVersion).put(static_cast<uint32_t>(members.size()));
  for (const auto& [id, lost] : members)
    out.putRaw(id).putString(std::string_view(lost).substr(0, kMostLost));
  return out.take();
}

Result<std::vector<MergeMember>> decode(ByteView bytes) {
  ByteReader in(bytes);
  const auto version = in.get<uint32_t>();
  const auto count = in.get<uint32_t>();
  std::vector<MergeMember> members;
  for (uint32_t i = 0; i < std::min(count, kMostMembers) && !in.failed(); ++i) {
    MergeMember& member = members.emplace_back();
    if (const auto id = in.getRaw(member.id.size()); !id.empty())
      std::ranges::copy(id, member.id.begin());
    member.lost = in.getString(kMostLost);
  }
  MOONCAKE_TRY(in.finish("rank of a merged group"));
  if (version != kVersion || members.empty() || count != members.size())
    return Error{ErrorCode::kMismatch,
                 "a rank that merges its group speaks another version of the protocol: install the "
                 "same mooncake-backend everywhere"};
  return members;
}

}  // namespace

Result<std::vector<Bytes>> MergeStore::get(const std::vector<std::string>& keys,
                                           Deadline deadline) {
  for (;;) {
    MOONCAKE_TRY(canBeComplete());
    auto values = store_.get(keys, deadline.earlier(Deadline::after(kLook)));
    const bool isLate = !values.ok() && values.error().code == ErrorCode::kTimeout;
    if (!isLate || deadline.passed()) return values;
  }
}

Status MergeStore::canBeComplete() {
  MOONCAKE_TRY(say());
  MOONCAKE_TRY(hear());
  RankTexts lost;
  size_t left = 0;
  for (const auto& [id, how] : known_) {
    left += how.empty();
    if (!how.empty()) lost.add(0, how);
  }
  const bool hasLostCaller =
      std::ranges::any_of(callers_, [this](const EngineId& id) { return !known_[id].empty(); });
  // While fewer members than expected are known, an unknown group may still arrive.
  const bool areTooFew = known_.size() >= size_t(size_) && left < size_t(size_);
  if (!hasLostCaller && !areTooFew) return {};
  return {ErrorCode::kRefused,
          "merge_remote_group of " + std::to_string(size_) + " ranks cannot be complete: " +
              lost.join(", ", [](const auto&, const std::string& how) { return how; }) +
              (lost.empty() ? "" : "; ") + std::to_string(left) +
              " of the ranks that can join are "
              "left. Call it again with their number and a new store, or a new prefix in it"};
}

Status MergeStore::say() {
  Bytes now = encode(members_());
  if (now == said_) return {};
  MOONCAKE_TRY(store_.set(keyOf(rank_), now));
  said_ = std::move(now);
  return {};
}

// Ranks are numbered in the order in which they come. So the search ends at the first rank that has
// published no list.
Status MergeStore::hear() {
  while (come_.size() < size_t(size_)) {
    const std::string next = keyOf(static_cast<int>(come_.size()));
    const auto isThere = store_.present(next);
    if (!isThere.ok()) return isThere.error();
    if (!*isThere) break;
    come_.push_back(next);
  }
  if (come_.empty()) return {};
  auto said = store_.get(come_, Deadline::after(kLook));
  if (!said.ok()) return said.error().code == ErrorCode::kTimeout ? Status() : said.error();
  known_.clear();
  callers_.clear();
  for (const Bytes& bytes : *said) {
    const auto members = decode(bytes);
    if (!members.ok()) return members.error();
    callers_.push_back(members->front().id);
    for (const auto& [id, lost] : *members) {
      std::string& how = known_[id];
      if (how.empty()) how = lost;
    }
  }
  return {};
}

}  // namespace mooncake
