#pragma once

#include <cstdint>
#include <set>

namespace mooncake {

// The set of the numbers 1, 2, 3 ... that have come, in any order.
class Serials {
 public:
  // How far a number may be ahead of the first missing one. An honest peer never comes near this.
  static constexpr uint64_t kMostAhead = uint64_t(1) << 16;

  // Returns false if the number has come before, or is too far ahead.
  bool add(uint64_t serial) {
    if (has(serial) || serial - below_ >= kMostAhead) return false;
    if (serial != below_) {
      above_.insert(serial);
      return true;
    }
    ++below_;
    while (!above_.empty() && *above_.begin() == below_) {
      above_.erase(above_.begin());
      ++below_;
    }
    return true;
  }
  bool has(uint64_t serial) const { return serial < below_ || above_.contains(serial); }
  uint64_t below() const { return below_; }  // all smaller ones have come
  const std::set<uint64_t>& above() const { return above_; }

 private:
  uint64_t below_ = 1;
  std::set<uint64_t> above_;
};

}  // namespace mooncake
