#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "base/backoff.h"
#include "base/result.h"
#include "group/group.h"
#include "group/line_members.h"
#include "group/line_words.h"
#include "group/successor_maker.h"

namespace mooncake {

// A successor that is being made, or is made.
struct Preparation {
  Successor successor;
  std::shared_ptr<SuccessorMaker> maker;
  std::shared_ptr<Group> group;  // once it is made
  Status failure;
  bool isGivenUp = false;             // by this rank, or by another member
  bool isWished = false;              // move to it once it is made
  std::set<int> movedTo;              // newcomer: members that are in it
  std::optional<Repetition> telling;  // on the rank that has proposed it

  bool isMade() const { return group || !failure.ok(); }
};

// The successors that a rank makes for its series, by digest. The caller serializes the calls
// (GroupLine's lock).
class SuccessorTable {
 public:
  using Entries = std::map<uint64_t, Preparation>;
  // `rank`: of the group, this one.
  SuccessorTable(const LineMembers& members, int rank) : members_(members), rank_(rank) {}

  const Entries& entries() const { return entries_; }
  // Null: there is none.
  Preparation* find(uint64_t digest);
  const Preparation* find(uint64_t digest) const;
  // False: it is there, or was given up.
  bool mayAdd(uint64_t digest) const;
  void add(uint64_t digest, Preparation preparation);
  // It is never made again.
  Preparation giveUp(uint64_t digest);
  // Another member has given it up. Returns whether it is there.
  bool noteGivenUp(uint64_t digest);
  // Takes all of them, as this rank goes to another series.
  Entries takeAll();

  // Members: the one for which this rank wishes if it wishes for one, the lowest proposer's. Null:
  // there is none. `active`: by rank, of the present series.
  const Entries::value_type* living(const std::vector<bool>& active) const;
  // Members: digests of successors to which no member moves.
  std::vector<uint64_t> voids(const std::vector<bool>& active) const;
  bool hasNewcomer(const Newcomer& newcomer) const;
  bool areAllMade() const;
  // Why it could not be made, also after giveUp().
  Status failureOf(uint64_t digest) const;

 private:
  bool isVoid(const Preparation& one, const std::vector<bool>& active) const;

  const LineMembers& members_;
  const int rank_;
  Entries entries_;
  std::set<uint64_t> givenUp_;
  std::pair<uint64_t, Status> lastFailure_;  // of one that was given up
};

}  // namespace mooncake
