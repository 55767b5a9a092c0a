#include "ep/token_lists.h"

#include "ep/routing.h"

namespace mooncake::ep {
namespace {

// Calls visit(place, token) once for each pair, tokens ascending.
template <typename Visit>
void forPlaces(std::span<const int32_t> chosen, size_t topk, std::span<const int> placeOf,
               size_t numPlaces, Visit visit) {
  std::vector<uint32_t> seen(numPlaces);  // the last token for the place, counted from 1
  for (size_t i = 0, t = 1; i < chosen.size(); i += topk, ++t) {
    for (const int32_t expert : chosen.subspan(i, topk)) {
      if (expert == kNoExpert) continue;
      const int place = placeOf[size_t(expert)];
      if (place < 0 || seen[size_t(place)] == t) continue;
      seen[size_t(place)] = uint32_t(t);
      visit(size_t(place), uint32_t(t - 1));
    }
  }
}

}  // namespace

TokenLists::TokenLists(std::span<const int32_t> chosen, size_t topk, std::span<const int> placeOf,
                       size_t numPlaces)
    : begins_(numPlaces + 1) {
  forPlaces(chosen, topk, placeOf, numPlaces,
            [&](size_t place, uint32_t) { ++begins_[place + 1]; });
  for (size_t p = 0; p < numPlaces; ++p) begins_[p + 1] += begins_[p];
  tokens_.resize(begins_.back());
  std::vector<uint32_t> next(begins_.begin(), begins_.end() - 1);
  forPlaces(chosen, topk, placeOf, numPlaces,
            [&](size_t place, uint32_t token) { tokens_[next[place]++] = token; });
}

}  // namespace mooncake::ep
