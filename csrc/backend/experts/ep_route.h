#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "backend/experts/ep_buffer.h"

namespace mooncake {

// The way of the rows of a dispatch of the normal mode, for their combines, and for dispatches that
// go the same way. Rows have the order of rank and token.
struct EpRoute {
  // Sizes that are the same on all ranks.
  struct Sizes {
    size_t tokens = 0;   // most of one rank
    size_t rows = 0;     // most that one rank receives
    size_t weights = 0;  // of a row, for which the combine has room
  };
  // One operation through host memory: the tokens of this rank from `begin` to `end`.
  struct Piece {
    int64_t begin = 0, end = 0;
    EpHandle handle;
    // By rank: the place of its first row among all. Empty: this is the only piece.
    std::vector<int64_t> firstRows;
  };
  std::shared_ptr<ep::Buffer> buffer;
  Sizes sizes;
  int64_t tokens = 0, hidden = 0;
  int64_t rows = 0;       // with a bound: places of rows
  int64_t shownRows = 0;  // that the caller sees, with zeros behind the received ones; 0: `rows`
  at::Tensor isInRank;    // bool [tokens][ranks]
  at::Tensor ranks;       // int32 [tokens][any]: the ranks of each token, -1 is none
  at::Tensor ends;        // int32 [ranks]: rows of the ranks up to this one, inclusive
  std::vector<bool> participants;
  std::vector<Piece> pieces;  // none by kernels
  at::Tensor sources;         // without a bound, int32 [rows]: index of the token at its rank
  std::optional<TokenHandle> kernels;
  // Through host memory, with a bound and one piece. Then, as by kernels, `ends` is on the device,
  // and there may be fewer rows than `rows`.
  bool isBounded = false;

  // The same on all ranks.
  uint64_t number() const {
    return kernels ? kernels->number : pieces.front().handle.dispatch->number;
  }
};

}  // namespace mooncake
