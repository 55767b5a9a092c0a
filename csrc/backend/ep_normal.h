#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/ep_buffer.h"

namespace mooncake {

// DeepEP's normal mode over an EpBuffer: a token's row goes once to each rank that has one of its
// experts, and the results have the sizes that the tokens of all ranks add up to. Tensors are
// contiguous, and the CPU's except where a comment says otherwise. One thread calls. All functions
// throw.
class EpNormal {
 public:
  explicit EpNormal(EpBuffer& buffer) : buffer_(buffer) {}

  // The numbers that each rank gave, and the ranks that took part.
  struct Count {
    std::vector<std::vector<uint32_t>> numbers;
    std::vector<bool> participants;
  };
  Count count(std::vector<uint32_t> numbers, const std::optional<at::Tensor>& activeRanks,
              int64_t timeoutMicros);

  struct DispatchArguments {
    const std::vector<at::Tensor>& fields;  // [tokens][any]: the parts of each token's row
    // int32 [tokens][any]: the ranks of each token, in the order in which the combine adds their
    // rows. -1 is none, in any place.
    const at::Tensor& ranks;
    int64_t maxTokens;               // of one rank; the same on all ranks
    int64_t hidden;                  // channels of the rows that the combine brings back
    const std::vector<bool>& among;  // the ranks that may take part; empty: all
    const std::optional<at::Tensor>& activeRanks;
    int64_t timeoutMicros;
    const std::string& error;  // not empty: ends the call on all ranks, as an invalid argument
    // Not empty: the rows go there, into fields and int32 [any], the sources; those of rank r to
    // the places from begins[r] up to ends[r].
    const std::vector<at::Tensor>& into;
    const std::vector<int64_t>& begins;
    const std::vector<int64_t>& ends;
    uint32_t agreed;  // any number; ranks that give different ones get an error
  };
  // The rows in the order of rank and token. With `into`, `fields` and `sources` are empty.
  struct Dispatch {
    std::vector<at::Tensor> fields;  // [rows][any]
    at::Tensor sources;              // int32 [rows]: index of the token at its rank
    at::Tensor ends;                 // int32 [ranks]: the rows up to those of the rank, inclusive
    std::vector<bool> participants;
    EpHandle handle;
  };
  // Waits for its end. Without Python's lock.
  Dispatch dispatch(const DispatchArguments& given);
  // A dispatch whose results have known places: those of rank r are in `into` from begins[r] up to
  // ends[r], and zeros if it takes no part. `fields`, `into`, without sources, and `activeRanks` are
  // on one device.
  EpBuffer::Call dispatchOnDevice(const DispatchArguments& given);

  // A dispatch with results of a size that all ranks know ahead. Nothing waits for its counts: it
  // runs when a stream with words has come to it. All tensors are on one device.
  struct WorstArguments {
    const std::vector<at::Tensor>& fields;
    const at::Tensor& ranks;  // as above
    int64_t hidden;
    int64_t extras;  // of a row, for which the combine gets room
    const std::optional<at::Tensor>& activeRanks;
    uint32_t agreed;
    const EpHandle* of;  // null, or that of an earlier dispatch, which all ranks must give
    // Outputs. Rows behind the received ones are not written.
    const std::vector<at::Tensor>& into;  // [rows][any]; as many rows on all ranks
    const at::Tensor& sources;            // int32 [rows]
    const at::Tensor& ends;               // int32 [ranks]
    const at::Tensor&
        table;  // int64 [ranks][ranks + 1]: by rank, its rows for each, and its tokens
    const at::Tensor& participants;  // bool [ranks]
  };
  struct Worst {
    EpHandle handle;
    EpBuffer::Call call;
  };
  Worst dispatchAtWorst(const WorstArguments& given);
  // Dispatches other fields the same way. The places of ranks that take no part become zeros.
  struct AgainArguments {
    const EpHandle& handle;  // of dispatchAtWorst()
    const std::vector<at::Tensor>& fields;
    const std::vector<at::Tensor>& into;
    const std::optional<at::Tensor>& activeRanks;
    int64_t timeoutMicros;
    uint32_t agreed;
  };
  EpBuffer::Call dispatchAsWorst(const AgainArguments& given);

  // All tensors are on the device of x, or the CPU's.
  struct CombineArguments {
    const at::Tensor& x;  // bfloat16 [rows][hidden]
    // Not empty, by rank: the place in x of the first row that came from it. Then x and extras have
    // further rows.
    const std::vector<int64_t>& firstRows;
    const EpHandle& handle;
    const std::optional<at::Tensor>& extras;  // float32 [rows][any]
    const std::vector<at::Tensor>& biases;    // bfloat16 [tokens][hidden]
    // Outputs: bfloat16 [tokens][hidden], float32 [tokens][any], and bool [tokens]: a rank that had
    // the token did not take part.
    const at::Tensor& sums;
    const std::optional<at::Tensor>& extraSums;
    const at::Tensor& missing;
    const std::vector<bool>& among;  // the ranks that may take part; empty: all
    const std::optional<at::Tensor>& activeRanks;
    int64_t timeoutMicros;
  };
  EpBuffer::Call combine(const CombineArguments& given);

  // See ep::Buffer::mostTokens().
  int64_t mostTokens(const std::vector<int64_t>& fieldBytes, int64_t hidden, int64_t extras,
                     double rowsPerToken) const;

 private:
  EpBuffer& buffer_;
};

}  // namespace mooncake
