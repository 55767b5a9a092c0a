#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include <ATen/core/Tensor.h>

#include "membership/rank_set.h"

namespace mooncake {

// An argument that all ranks have to give alike: a number below 2^32, a tensor, whose dtype and
// columns count, or none.
struct Agreed {
  std::string name;
  std::variant<std::monostate, int64_t, at::Tensor> value;
};

// Returns two numbers for each argument.
std::vector<uint32_t> numbersOf(const std::vector<Agreed>& agreed);
uint32_t hashOf(const std::vector<Agreed>& agreed);
// Returns a hash of the number, and of the dtypes and columns of a dispatch's fields.
uint32_t hashOf(const std::vector<at::Tensor>& fields, uint64_t number);
// Names the first argument that differs, and each rank's value. Empty: all are the same. `all`: by
// rank, numbersOf() from `begin` on.
std::string differenceOf(const std::vector<Agreed>& agreed,
                         const std::vector<std::vector<uint32_t>>& all, size_t begin,
                         const GroupRanks& ranks);

}  // namespace mooncake
