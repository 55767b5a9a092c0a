#pragma once

#include <cstdint>
#include <set>

namespace mooncake {

// Which of the numbers 1, 2, 3 ... have come, in whatever order.
class Serials {
 public:
  // How far one may be ahead of the first that is missing. Nobody honest comes near it.
  static constexpr uint64_t kMostAhead = uint64_t(1) << 16;

  // False: it had come before, or it is too far ahead.
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
