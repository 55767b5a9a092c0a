#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace mooncake {

// Places that any number of owners share. Half of them belong to the owners, in equal parts: an
// owner that gives nothing back takes no place of another owner's part. From the other half an
// owner gets a place while it has fewer of them than `kShareOfLeft` times the free ones. With more
// owners than half of the places the parts are empty. That half then goes to owners without a
// place, one each. Not thread-safe.
class FairShares {
 public:
  static constexpr size_t kShareOfLeft = 2;

  // The number of places of one owner. Its address must not change from add() to remove().
  class Owner {
   public:
    size_t held() const { return held_; }

   private:
    friend class FairShares;
    size_t held_ = 0;
  };

  explicit FairShares(size_t places) : places_(places), left_(places) {}

  void add(Owner& owner) {
    owners_.push_back(&owner);
    divide();
  }
  void remove(Owner& owner) {
    std::erase(owners_, &owner);
    divide();
  }

  size_t left() const { return left_; }
  bool mayTake(const Owner& owner) const {
    if (left_ == 0) return false;
    if (owner.held_ < std::max(part_, size_t(1))) return true;
    const size_t kept = part_ == 0 ? places_ / 2 : owed_;
    return left_ > kept && owner.held_ - part_ < kShareOfLeft * (left_ - kept);
  }
  void take(Owner& owner) {
    if (owner.held_ < part_) --owed_;
    ++owner.held_;
    --left_;
  }
  void giveBack(Owner& owner) {
    --owner.held_;
    ++left_;
    if (owner.held_ < part_) ++owed_;
  }

 private:
  void divide() {
    part_ = owners_.empty() ? 0 : places_ / 2 / owners_.size();
    owed_ = 0;
    for (const Owner* owner : owners_) owed_ += part_ - std::min(part_, owner->held_);
  }

  const size_t places_;
  size_t left_;
  size_t part_ = 0;  // places that belong to each owner
  size_t owed_ = 0;  // free places of all parts
  std::vector<Owner*> owners_;
};

}  // namespace mooncake
