#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/experts/ep_agreed.h"
#include "backend/experts/ep_buffer.h"
#include "backend/experts/ep_route.h"

namespace mooncake {

// DeepEP's normal mode over an EpBuffer: a token's row goes once to each rank that has one of its
// experts. A dispatch is one of these:
//
//   counted  the ranks first exchange how many tokens they have, so the host waits
//   bounded  the caller gives a bound for the received rows, and the host waits for nothing
//   again    the rows go the way of an earlier dispatch, to the same places
//
// By kernels rows stay on their device. Otherwise they go through host memory, in as many pieces
// as the buffer's memory asks for. There the host waits for no dispatch again, and for no combine,
// if the device's streams know words; a bounded dispatch needs such streams and one piece.
//
// One thread calls. All functions throw.
class EpNormal {
 public:
  explicit EpNormal(EpBuffer& buffer);

  // Begins a call of the program. If this rank refuses it, `operations` of the group end with the
  // error on all ranks. `isAlone`: the other ranks wait for none of them.
  void begin(int operations, bool isAlone);
  // Ends the call with this error on the ranks that wait for it. Returns false if the call has ended
  // on all ranks already.
  bool refuse(const std::string& why);

  // Whether kernels do the calls with tensors of this device. Collective, the first time.
  bool byKernels(const c10::Device& device) const;

  // Most rows that a rank receives, and most tokens of one rank; empty: not known.
  struct Bound {
    size_t rows = 0;
    std::optional<size_t> tokens;
  };
  // Whether a dispatch of such rows can be bounded: the same on all ranks. `weights`: see Dispatch.
  bool takesBound(const std::vector<at::Tensor>& fields, const Bound& bound,
                  std::optional<size_t> weights, int64_t timeoutMicros);

  // Tensors are on one device, except the counts.
  struct Dispatch {
    std::vector<at::Tensor> fields;  // [tokens][any]: the parts of each token's row
    const EpRoute* again = nullptr;  // not null: of that only fields and participation are read
    at::Tensor isInRank;             // bool [tokens][ranks]
    // int32 [tokens][any]: the ranks of each token, in the order in which the combine adds their
    // rows. -1 is none, in any place. Empty: the order of ranks.
    std::optional<at::Tensor> ranks;
    at::Tensor perExpert;  // int64 on the CPU: tokens of this rank for each expert
    std::vector<Agreed> agreed;
    std::optional<size_t>
        weights;  // of a row, for which the combine gets room; empty: for any top-k
    std::optional<Bound> bound;
    const EpRoute* of = nullptr;  // with a bound: the dispatch to which the rows belong
    size_t shownRows = 0;         // see EpRoute; 0: as many as there are
    std::optional<at::Tensor> activeRanks;
    int64_t timeoutMicros = -1;  // 0 or less: no rank is skipped before the buffer's timeout
  };
  struct Arrived {
    std::vector<at::Tensor> fields;
    // Not of a dispatch again, on the device of EpRoute::ends:
    at::Tensor sources;  // int32 [rows]: index of the token at its rank
    at::Tensor table;    // int64 [ranks][ranks + 1]: by rank, its rows for each, and its tokens
    at::Tensor there;    // bool [ranks]: the ranks that took part
    std::optional<EpRoute> route;
    // Of a counted dispatch, int64 [ranks][experts]: tokens of each rank, and tokens of ranks
    // that took part.
    at::Tensor counted, experts;
    std::shared_ptr<EpWork> work;  // of a dispatch for which the host waits not
  };
  Arrived dispatch(const Dispatch& given);

  // Tensors are on the device of x.
  struct Combine {
    at::Tensor x;  // bfloat16 [rows or more][hidden]
    const EpRoute& route;
    std::optional<at::Tensor> weights;  // float32 [rows or more][any]
    std::vector<at::Tensor> biases;     // bfloat16 [tokens][hidden]
    std::optional<at::Tensor> activeRanks;
    int64_t timeoutMicros = -1;
    bool inBackground = false;
  };
  // Valid when the work has ended. `missing`, bool [tokens]: a rank that had the token did not take
  // part.
  struct Combined {
    at::Tensor sums, missing;
    std::optional<at::Tensor> weightSums;
    std::shared_ptr<EpWork> work;
  };
  Combined combine(const Combine& given);

  // Waits for all ranks.
  void barrier();

  // See ep::Buffer::mostTokens(). `fieldBytes`: of each part of a token's row.
  size_t mostTokens(const std::vector<size_t>& fieldBytes, size_t hidden, size_t weights,
                    double rowsPerToken) const;

 private:
  using Tensors = std::vector<at::Tensor>;
  using Sizes = EpRoute::Sizes;
  // The cut of a dispatch: pieces, and the tokens of each rank in one of them.
  struct Cut {
    int64_t pieces, step;
  };
  // The numbers that the ranks give before a counted dispatch: tokens, tokens for each rank and
  // for each expert, and numbersOf() the arguments that have to be alike.
  struct Counts {
    size_t ranks = 0, experts = 0;
    std::vector<std::vector<uint32_t>> all;  // by rank
    GroupRanks there;                        // the ranks that take part

    int64_t tokens(size_t rank) const { return all[rank][0]; }
    int64_t forRank(size_t from, int to) const { return all[from][1 + size_t(to)]; }
    size_t agreed() const { return 1 + ranks + experts; }
    // Rows that the rank receives.
    size_t rowsOf(size_t to) const {
      size_t rows = 0;
      for (size_t r = 0; r < ranks; ++r)
        if (there.contains(int(r))) rows += size_t(forRank(r, int(to)));
      return rows;
    }
    // Whether rows come from one rank to the other.
    bool isIn(int to, size_t from) const { return there.contains(to) && there.contains(int(from)); }
  };

  Counts count(const Dispatch& given, bool kernels);
  Arrived counted(const Dispatch& given);
  Arrived sendCounted(const Dispatch& given, const Tensors& fields, EpRoute route,
                      const std::vector<int64_t>& expected, GroupRanks& there);
  Arrived bounded(const Dispatch& given);
  Arrived again(const Dispatch& given);
  Arrived againBounded(const Dispatch& given, const Tensors& fields);
  size_t room(const Tensors& fields, size_t weights, double rowsPerToken) const;
  bool fitsAtOnce(const Tensors& fields, const Sizes& sizes) const;
  Cut cut(const Tensors& fields, const Sizes& sizes, int64_t timeoutMicros) const;
  EpRoute routeOf(const Dispatch& given) const;
  std::shared_ptr<EpWork> carryOut(EpBuffer::Call call, int more);

  EpBuffer& ours_;
  const int size_, rank_;
  int due_ = 0;  // operations of the call for which other ranks wait if this rank refuses it
  bool isAlone_ = false;
};

}  // namespace mooncake
