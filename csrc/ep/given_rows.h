#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "ep/calls.h"
#include "ep/shared_rows.h"
#include "ep/token_lists.h"
#include "group/operation.h"

namespace mooncake::ep {

// The rows that a rank gives in an attempt at a dispatch: in its send memory, and on their way to
// ranks that do not map it.
//
// Rows are put as soon as they stand here, without waiting for anybody: nobody reads that memory of
// the operation before last any more, and its owner does not write there, having begun the one in
// between. A fetch costs the time until the last rank has begun, its request waits on a slow link
// behind the rows of a neighbour that go the same way, and at its owner for a processor. Cards
// write the rows from where they stand; without them they are put. What is fetched all the same:
// rows that are so many that their requests cost nothing, and that a word about a lost rank would
// have to wait behind; rows for which there is no room in the send memory of the others; and those
// for a rank that was late last time.
//
// Nothing of an earlier attempt may come upon the rows of a later one. Over a stream puts come in
// order. Cards keep none, so the writes of an attempt end before the next one begins. Those that
// the whole operation leaves under way, because a path failed, are given up, and nothing is written
// to that rank again.
class GivenRows {
 public:
  GivenRows(Memory& memory, const DispatchCall& call);
  ~GivenRows();

  // Writes them, and packs those for ranks that do not map us.
  Status stage(Operation& op);
  // None: all map us.
  const std::optional<SharedRows>& shared() const { return shared_; }
  // Of rows that go with a table, at most.
  size_t mostInTable() const { return mostInTable_; }
  // Writes the encoded table for a rank that does not map us, and its rows where they go with it.
  // Returns the number of bytes.
  size_t write(const Operation& op, int to, ByteView table, std::byte* payload) const;
  // Puts, or has cards write, what is pushed, once the tables are published.
  Status push(Operation& op);

 private:
  // The rows for one rank that does not map us, or for all of its host.
  struct Packed {
    std::span<const uint32_t> tokens;  // in byHost_ or byRank_
    size_t offset = 0;    // in the send memory; only of those that do not go with the table
    bool areAll = false;  // `tokens` or not: all stand there, at `offset` 0
    std::optional<SharedRows::Place> pushedTo;
    bool isWritten = false;  // there, by cards

    size_t rows(size_t tokensOfRank) const { return areAll ? tokensOfRank : tokens.size(); }
  };

  Status checkEnd(const Operation& op, size_t end, size_t limit) const;
  // Copies the rows to `offset`, and moves that behind them.
  Status pack(const Operation& op, Packed& packed, size_t& offset) const;
  std::optional<SharedRows::Place> placeFor(const Operation& op, const std::vector<int>& host,
                                            const Packed& packed) const;
  bool isChosen(size_t token) const;
  void writeRow(size_t token, std::byte* to, CopyHint hint) const;
  size_t bytesOf(const Packed& packed) const { return packed.rows(handle_.tokens) * rowBytes_; }

  Memory& memory_;
  const DispatchCall& call_;
  const Handle& handle_;
  const Shape& shape_;
  const ExpertMap& experts_;
  const size_t rowBytes_;
  std::optional<SharedRows> shared_;
  TokenLists byHost_, byRank_;  // the tokens for each of them
  std::vector<Packed> packed_;  // by rank
  std::optional<Writes> writes_;
  size_t mostInTable_ = 0;
};

}  // namespace mooncake::ep
