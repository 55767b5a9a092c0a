#pragma once

#include <map>
#include <optional>
#include <vector>

#include "membership/view_agreement.h"

namespace mooncake {

// Reports of who has left, from others. Theirs may overtake what the one who left said to us last,
// "I have your message" say: whoever took it for gone then would call lost what has arrived. Its
// own goodbye comes behind all that on the same connection, so a report waits for it, but not for
// long: that connection may have broken. Pure. For the agreement it is as if the report came later.
class HeldReports {
 public:
  explicit HeldReports(Clock::duration limit) : limit_(limit) {}

  // Whether it is held. `known`: of these nothing more is to be heard.
  bool keep(const ViewReport& report, const RankSet& known, Clock::time_point now);
  // Those that need to wait no longer.
  std::vector<ViewReport> take(const RankSet& known, Clock::time_point now);
  std::optional<Clock::time_point> nextTick() const;

 private:
  struct Held {
    ViewReport report;  // the last one says what the others say
    Clock::time_point until;
  };

  const Clock::duration limit_;
  std::map<int, Held> held_;  // by who said it
};

}  // namespace mooncake
