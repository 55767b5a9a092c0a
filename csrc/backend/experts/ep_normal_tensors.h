#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "membership/rank_set.h"

// Tensors of the normal mode. Nothing here waits for a device, unless a tensor moves to the CPU.
namespace mooncake {

// Returns the values in memory of the device: torch marks some as conjugated or negated instead.
at::Tensor plain(const at::Tensor& given, const c10::Device& home);
std::vector<at::Tensor> plain(const std::vector<at::Tensor>& given, const c10::Device& home);
// Returns the rows as bytes: not every dtype of FP8 can be indexed or filled.
at::Tensor asBytes(const at::Tensor& rows);
// Refuses a tensor that is not on the device of x.
void requireHome(const c10::Device& home, const std::optional<at::Tensor>& given,
                 const std::string& name);
// Returns int32 [tokens][any]: the ranks of each token, -1 is none. On a device each rank has its
// own column.
at::Tensor ranksOf(const at::Tensor& isInRank);
// Returns int32 [tokens][any][2]: the ranks of each token, and its place among the tokens for that
// rank.
at::Tensor choicesOf(const at::Tensor& isInRank, const at::Tensor& ranks);
// Makes the rows behind the received ones zeros.
void clearBehind(const std::vector<at::Tensor>& all, const at::Tensor& ends);
// Returns the rows with zeros behind them, up to this number.
at::Tensor padded(const at::Tensor& rows, int64_t count);
// Returns blocks of the rows side by side.
at::Tensor joined(const at::Tensor& rows, const std::vector<int64_t>& begins,
                  const std::vector<int64_t>& counts);
std::vector<int64_t> beginsOf(const std::vector<int64_t>& counts);
int64_t sumOf(const std::vector<int64_t>& counts);

std::vector<bool> flagsOf(const GroupRanks& ranks, int size);
at::Tensor tensorOf(const std::vector<bool>& flags);
// Returns int32 [ranks], a copy of the caller's mask; all ranks without one.
at::Tensor maskOn(const c10::Device& device, const std::optional<at::Tensor>& activeRanks,
                  int size);
// Clears the ranks in the caller's mask that are gone: bool [ranks], on any device.
void show(const std::optional<at::Tensor>& activeRanks, const at::Tensor& gone);

}  // namespace mooncake
