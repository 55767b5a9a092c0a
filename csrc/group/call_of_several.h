#pragma once

#include "group/group.h"
#include "group/renewal.h"

namespace mooncake {

// A call of the group runs several operations one after the other. All but the last one say that
// further ones follow, so that the group's series is never closed inside the call. Only for the
// thread that runs the group's operations. Calls may lie within each other.
class CallOfSeveral {
 public:
  explicit CallOfSeveral(Group& group) : group_(group), isWithin_(group.goesOn) {
    group_.goesOn = true;
  }
  ~CallOfSeveral() { group_.goesOn = isWithin_; }
  CallOfSeveral(const CallOfSeveral&) = delete;
  CallOfSeveral& operator=(const CallOfSeveral&) = delete;

  // The next operation is the last one of this call.
  void last() { group_.goesOn = isWithin_; }
  // The call ends behind the operation that it ran last, although that said that further ones
  // follow. All members end it there, because the reason follows from results that are the same on
  // all.
  void endsHere() { group_.renewal().callEnds(); }

 private:
  Group& group_;
  const bool isWithin_;
};

}  // namespace mooncake
