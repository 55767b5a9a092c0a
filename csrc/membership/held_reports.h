#pragma once

#include <map>
#include <optional>
#include <vector>

#include "membership/view_agreement.h"

namespace mooncake {

// Holds back a report that says that a rank has left, until we have that rank's goodbye, too. The
// report may overtake the leaver's last messages to us, such as "I have your message". If we took
// the leaver for gone at once, we would call lost a message that has arrived. The goodbye follows
// these messages on the same connection, so the report waits for it. The wait is short, because
// that connection may have broken. Pure. To the agreement, a held report looks like a late one.
class HeldReports {
 public:
  explicit HeldReports(Clock::duration limit) : limit_(limit) {}

  // Returns true if the report is held. `known`: ranks from which no goodbye is expected any more.
  bool keep(const ViewReport& report, const JobRanks& known, Clock::time_point now);
  // Returns the reports that no longer need to wait.
  std::vector<ViewReport> take(const JobRanks& known, Clock::time_point now);
  std::optional<Clock::time_point> nextTick() const;

 private:
  struct Held {
    ViewReport report;  // the latest of its sender, which includes the earlier ones
    Clock::time_point until;
  };

  Clock::duration limit_;
  std::map<int, Held> held_;  // by sender
};

}  // namespace mooncake
