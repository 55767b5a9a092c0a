#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "ep/hosts.h"
#include "ep/layout.h"
#include "ep/routing.h"
#include "group/group.h"

// Arguments and results of dispatch and combine. The caller keeps all memory until the call ends.
// `inputs` of a call: an error if this rank has no inputs for it. The call then ends with this error
// on all ranks, and the buffer goes on.
namespace mooncake::ep {

// Memory that all calls of a buffer use.
struct Memory {
  Group& group;
  Group::Shared block;  // the buffer's memory, in the arena
  BufferLayout layout;
  Hosts hosts;

  std::byte* send(uint64_t number) const { return block.data + layout.send(number); }
  std::byte* recv(size_t which) const { return block.data + layout.recv(which); }  // 0 or 1
};

// The facts about a dispatch that its combine needs. Written by the dispatch.
struct Handle {
  Shape shape;
  std::shared_ptr<const ExpertMap> experts;
  std::atomic<bool> isDone{false};  // its dispatch has ended well

  size_t tokens = 0;  // number of tokens of this rank
  size_t topk = 0;
  std::vector<int32_t> chosen;  // [token][top-k], kNoExpert or below the number of experts

  // Set by the dispatch when it has ended well.
  uint64_t number = 0;
  GroupRanks participants;                  // ranks that took part
  std::vector<CombineTable::Range> ranges;  // [local expert][rank]: the rows that came from it
};

// A part of each token's row in the normal mode, such as its channels, its scales or its weights.
// It arrives as it was.
struct Field {
  const std::byte* from = nullptr;  // [tokens][bytes]
  size_t bytes = 0;
  std::byte* to = nullptr;  // [rows][bytes]
};
// Bytes of a field in a sent row.
constexpr size_t sentBytes(const Field& field) { return roundUp(field.bytes, 16); }

struct DispatchCall {
  Status inputs;
  RowFormat format = RowFormat::kBf16;
  bool packsScales = false;     // UE8M0
  const uint16_t* x = nullptr;  // [tokens][hidden]
  GroupRanks mask;              // ranks that the caller counts as active
  Deadline deadline = Deadline::at(Clock::time_point::max());
  std::optional<Clock::duration> patience;  // Operation::skipAfter()
  bool goesOn = false;                      // see Call::goesOn; not with `patience`
  std::shared_ptr<Handle> handle;
  // Of kFields. Then the experts are the ranks themselves, so each rank has one expert.
  std::vector<Field> fields;
  uint32_t agreed = 0;  // of kFields: a number that must be the same on all ranks
  // Of kFields, by rank: the places of its rows, where fields and `sources` have rows of several
  // calls. Empty: all rows stand side by side.
  struct Places {
    size_t begin = 0, end = 0;
  };
  std::vector<Places> places;
  std::optional<size_t> room;  // of kFields: rows for which Field::to and `sources` have places

  size_t rowBytes() const;  // in sent form

  // Results; rows are [local expert][rank * T + place].
  std::byte* rows = nullptr;    // hidden channels each
  std::byte* scales = nullptr;  // [local expert][scale or word of four][row]
  int32_t* counts = nullptr;    // [local expert]
  int32_t* sources = nullptr;   // [local expert][row]: index of the token at its rank; may be null
  int64_t* ranges = nullptr;    // [local expert][rank]: begin << 32 | count
  int32_t* addedCounts = nullptr;  // [local expert], added to; may be null
  int64_t* waits = nullptr;        // [rank], added to, in microseconds; may be null
};

struct CombineCall {
  Status inputs;
  const std::byte* x = nullptr;  // [local expert][rank * T + place] rows of bf16
  std::optional<size_t> rows;    // number of rows in x, if they end with the last used one
  // After a dispatch of kFields, by rank: the place in x of the first row that came from it. Empty:
  // x has the rows of this dispatch only.
  std::vector<size_t> firstRows;
  size_t rowStride = 0;         // bytes
  bool isInPlace = false;       // x is the send memory of this operation
  uint64_t expectedNumber = 0;  // number of that operation, if isInPlace
  bool usesLogfmt = false;
  bool renormalizes = false;
  std::vector<int32_t> chosen;  // [tokens][topk]
  const float* weights = nullptr;
  GroupRanks mask;
  Deadline deadline = Deadline::at(Clock::time_point::max());
  std::optional<Clock::duration> patience;
  bool goesOn = false;
  std::shared_ptr<Handle> handle;

  // Rows that are added to the experts' rows, before them.
  std::vector<const uint16_t*> biases;  // [tokens][hidden] each
  // Further numbers of each row, which are summed without weights.
  size_t extras = 0;                    // of a row
  const float* extrasOfRows = nullptr;  // as x: [row][extras]
  float* extraSums = nullptr;           // [tokens][extras]

  uint16_t* combined = nullptr;  // [tokens][hidden]
  bool* missing = nullptr;       // by token
  int64_t* waits = nullptr;
};

// The ranks that took part: in the agreed view, not skipped, and active for all callers.
struct Ending {
  GroupRanks participants;
};

// Operations of the group, one after the other. Who was skipped ends them as if it had been masked:
// nothing comes to it, and nothing of it goes anywhere.
Status dispatch(const Memory& memory, DispatchCall& call, Ending& ending);
Status combine(const Memory& memory, CombineCall& call, Ending& ending);

}  // namespace mooncake::ep
