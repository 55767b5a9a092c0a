#include "backend/calls/input_cut.h"

#include <algorithm>
#include <utility>

#include "collectives/input_feed.h"

namespace mooncake {

InputCut cutPieces(const at::Tensor& part, size_t parts, size_t ofEach) {
  const size_t bytes = part.nbytes(), pieceBytes = fedPieceBytes(bytes, parts);
  return pieceBytes < bytes ? InputCut{pieceBytes, ofEach} : InputCut{};
}

InputCut cutReduction(const c10d::ReduceOp& op, const at::Tensor& part, size_t parts,
                      size_t ofEach) {
  return op == c10d::ReduceOp::PREMUL_SUM ? InputCut{} : cutPieces(part, parts, ofEach);
}

InputCut cutParts(const std::vector<at::Tensor>& inputs, std::vector<int64_t> lengths) {
  size_t longest = 0, all = 0;
  const auto count = [&](size_t bytes) {
    longest = std::max(longest, bytes);
    all += bytes;
  };
  for (const at::Tensor& input : inputs) {
    if (lengths.empty()) count(input.nbytes());
  }
  for (const int64_t length : lengths) count(size_t(length) * inputs[0].element_size());
  const size_t pieceBytes = splitPieceBytesOf(longest, all);
  return pieceBytes < longest ? InputCut{pieceBytes, 1, std::move(lengths)} : InputCut{};
}

}  // namespace mooncake
