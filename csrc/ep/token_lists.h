#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace mooncake::ep {

// The tokens of one rank by the places that its rows go to: ranks, or hosts. A token is in the list
// of each place that runs one of its experts, once. The lists are ascending.
class TokenLists {
 public:
  TokenLists() = default;
  // Reads `chosen`, [token][topk], twice. `placeOf` gives the place of an expert; negative: none.
  TokenLists(std::span<const int32_t> chosen, size_t topk, std::span<const int> placeOf,
             size_t numPlaces);

  // The tokens for the place. Valid as long as this object.
  std::span<const uint32_t> of(size_t place) const {
    return std::span(tokens_).subspan(begins_[place], begins_[place + 1] - begins_[place]);
  }

 private:
  std::vector<uint32_t> begins_;  // by place; one entry more
  std::vector<uint32_t> tokens_;
};

}  // namespace mooncake::ep
