#pragma once

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

#include "ep/calls.h"
#include "ep/shared_rows.h"
#include "ep/token_lists.h"
#include "group/operation.h"
#include "group/writes.h"

namespace mooncake::ep {

// The rows that a rank sends in an attempt at a dispatch: in its send memory, and in flight to
// ranks that do not map it.
//
// Rows are pushed as soon as they are staged, without waiting for any rank. They go to the send
// memory that the receiver used in the operation before last. No rank reads that memory any more,
// and the receiver does not write there, because it has begun the operation in between. Cards write
// the rows from where they stand; without cards the rows are put.
//
// Rows of an earlier attempt must not land on rows of a later one, or of a later operation. A later
// combine fills all send memory, and a dispatch of another shape has other places. Over a stream
// puts come in order, ahead of the report that the attempt has stopped. Cards keep no order, so a
// rank ends its writes before it reports (Writes::end).
class GivenRows {
 public:
  GivenRows(const Memory& memory, const DispatchCall& call);

  // Writes the rows, and packs rows for ranks that do not map us.
  Status stage(Operation& op);
  // None: all ranks map us.
  const std::optional<SharedRows>& shared() const { return shared_; }
  // Most bytes of rows that go with one table.
  size_t mostInTable() const { return mostInTable_; }
  // Writes the encoded table for a rank that does not map us, and its rows if they go with the
  // table. Returns the number of bytes.
  size_t write(const Operation& op, int to, ByteView table, std::byte* payload) const;
  // Pushes rows, by puts or by writes of cards. Called once the tables are published.
  Status push(Operation& op);
  // Ends all writes of the attempt.
  void stop() { writes_.reset(); }

 private:
  // The rows for one rank that does not map us, or for all of its host.
  struct Packed {
    std::span<const uint32_t> tokens;  // in byHost_ or byRank_
    size_t offset = 0;                 // in the send memory; unused if the rows go with the table
    bool areAll = false;               // all rows are sent, not only `tokens`; `offset` is 0
    std::optional<SharedRows::Place> pushedTo;
    bool isWritten = false;  // pushed by writes of cards

    size_t rows(size_t tokensOfRank) const { return areAll ? tokensOfRank : tokens.size(); }
  };

  Status checkEnd(const Operation& op, size_t end, size_t limit) const;
  // Copies the rows to `offset`, and advances it.
  Status pack(const Operation& op, Packed& packed, size_t& offset) const;
  std::optional<SharedRows::Place> placeFor(const Operation& op, const std::vector<int>& host,
                                            const Packed& packed) const;
  bool isChosen(size_t token) const;
  void writeRow(size_t token, std::byte* to, CopyHint hint) const;
  size_t bytesOf(const Packed& packed) const { return packed.rows(handle_.tokens) * rowBytes_; }

  const Memory& memory_;
  const DispatchCall& call_;
  const Handle& handle_;
  const Shape& shape_;
  const ExpertMap& experts_;
  const size_t rowBytes_;
  std::optional<SharedRows> shared_;
  TokenLists byHost_, byRank_;  // the tokens for each host, for each rank
  std::vector<Packed> packed_;  // by rank
  std::optional<Writes> writes_;
  size_t mostInTable_ = 0;
};

}  // namespace mooncake::ep
