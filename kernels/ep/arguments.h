#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/collectives.h"
#include "kernels/common/host_device.h"

// The arguments of the kernels for experts, and the memory that a rank publishes for them. Rows and
// their order are as in csrc/ep. Addresses are the device's.
namespace mooncake::kernels {

constexpr unsigned kMostTopk = 32;       // experts of a token: a lane has one of them
constexpr unsigned kMostExperts = 8192;  // a word for each is in a block's shared memory
constexpr int32_t kNone = -1;            // no expert

// Owner of an expert, and its place among the owner's experts.
struct Expert {
  int32_t owner, local;
};

// One of a token's experts, and its place among this rank's choices of that expert.
struct Choice {
  int32_t expert;  // kNone: none
  uint32_t index;
};

// The end of a dispatch, for the combine of its rows.
struct Dispatched {
  uint64_t number;        // of the operation
  uint64_t participants;  // bits of ranks
};

// The begin of published memory. A Failure other than kNone: the rank's inputs are wrong,
// and the operation fails on all ranks.
struct RowsHeader {
  uint64_t mask;      // bits of the ranks that the caller counts as active
  uint64_t dispatch;  // combine: number of the dispatch of these rows
  uint32_t tokens, topk;
  uint32_t failure;
};

enum class RowKind : uint8_t { kBf16, kFp8, kFp8Rounded };

// A row in sent form: bfloat16 as it is, or float32 scales | e4m3 channels. Both parts begin and end
// at a unit, so that warps copy them in units.
constexpr size_t kUnit = 16;
MOONCAKE_HOST_DEVICE constexpr size_t toUnit(size_t bytes) {
  return (bytes + kUnit - 1) / kUnit * kUnit;
}
MOONCAKE_HOST_DEVICE constexpr size_t scalesOf(size_t hidden) { return (hidden + 127) / 128; }
MOONCAKE_HOST_DEVICE constexpr size_t sentScaleBytes(size_t hidden) {
  return toUnit(scalesOf(hidden) * sizeof(float));
}
constexpr size_t sentRowBytes(size_t hidden, RowKind kind) {
  return kind == RowKind::kBf16 ? toUnit(2 * hidden) : sentScaleBytes(hidden) + toUnit(hidden);
}

constexpr size_t kLine = 128;  // each part begins at a multiple
MOONCAKE_HOST_DEVICE constexpr size_t toLine(size_t bytes) {
  return (bytes + kLine - 1) / kLine * kLine;
}
// Offsets in published memory.
//   dispatch: RowsHeader | uint32 rows of each expert | Choice [tokens][topk] | rows in sent form
//   combine:  RowsHeader | uint32 first row [local expert][rank] | rows [local expert][ranks * T]
// In the inbox of a remote rank they are the same, but only the rows for that rank are there. A
// combine's rows are [local expert][T] by Choice::index.
MOONCAKE_HOST_DEVICE constexpr size_t countsAt() { return kLine; }
MOONCAKE_HOST_DEVICE constexpr size_t choicesAt(size_t experts) {
  return countsAt() + toLine(experts * sizeof(uint32_t));
}
MOONCAKE_HOST_DEVICE constexpr size_t tokensAt(size_t experts, size_t tokens, size_t topk) {
  return choicesAt(experts) + toLine(tokens * topk * sizeof(Choice));
}
MOONCAKE_HOST_DEVICE constexpr size_t answersAt(size_t mostLocal, size_t ranks) {
  return kLine + toLine(mostLocal * ranks * sizeof(uint32_t));
}

// topk_idx: [tokens][topk].
struct Chosen {
  const void* experts;
  bool areWide;  // int64, else int32
  unsigned tokens, topk;
};

// The same in all four kernels.
struct ExpertCall {
  Exchange exchange;
  size_t maxTokens;  // most tokens of a rank
  size_t hidden;     // channels of a row
  unsigned experts;  // of all ranks
  unsigned local;    // of this rank
  size_t rowBytes;   // in published memory
  size_t answersAt;  // see answersAt(): of the rank with most experts
};

// The ranks that a caller counts as active.
struct Mask {
  const uint64_t* buffer;    // the buffer's bits, at the moment that the kernel runs
  int32_t* ranks = nullptr;  // [rank]: 0 excludes a rank, and is written if one takes no part
};

struct DispatchSend {
  ExpertCall call;
  Mask mask;
  Chosen chosen;
  const unsigned char* x;  // [tokens][hidden] of bfloat16
  RowKind kind;
  Choice* choices;        // [tokens][topk], for the combine
  const Expert* experts;  // by expert, for ranks on other hosts
};

struct DispatchReceive {
  ExpertCall call;
  Mask mask;
  RowKind kind;
  bool packsScales;       // UE8M0
  const Expert* experts;  // by expert
  const int32_t* mine;    // the experts of this rank
  unsigned char* rows;    // [local expert][row] of channels
  uint32_t* scales;       // [local expert][scale or word of four][row]
  int32_t* counts;        // [local expert]
  int32_t* sources;       // [local expert][row]: the token at its rank
  int64_t* ranges;        // [local expert][rank]: begin << 32 | count
  // For the combine: callers may change their own copies.
  int32_t* keptCounts;
  int64_t* keptRanges;
  Dispatched* dispatched;
  int32_t* addedCounts;  // [local expert], added to; may be null
  int64_t* waits;        // [rank], added to, in microseconds; may be null
};

struct CombineSend {
  ExpertCall call;
  Mask mask;
  Chosen chosen;
  const Choice* choices;
  const unsigned char* x;  // [local expert][row][hidden] of bfloat16; null: it is published already
  bool usesLogfmt;
  const int32_t* counts;  // as kept by the dispatch
  const int64_t* ranges;
  const Dispatched* dispatched;
};

struct CombineReceive {
  ExpertCall call;
  Mask mask;
  Chosen chosen;
  const Choice* choices;
  const float* weights;  // [tokens][topk]
  bool usesLogfmt;
  bool renormalizes;
  const Expert* experts;
  const Dispatched* dispatched;
  unsigned char* combined;  // [tokens][hidden] of bfloat16
  bool* missing;            // [tokens]
  int64_t* waits;           // [rank], added to, in microseconds; may be null
};

}  // namespace mooncake::kernels
