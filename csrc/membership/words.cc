#include "membership/words.h"

#include <array>
#include <ctime>

#include "base/rank_list.h"

namespace mooncake {

const char* nameOf(Cause cause) {
  switch (cause) {
    case Cause::kExited:
      return "exited";
    case Cause::kLeft:
      return "left";
    case Cause::kSilent:
      return "silent";
    case Cause::kRefused:
      return "refuses connections";
    case Cause::kUnreachable:
      return "cannot be reached";
    case Cause::kExcludes:
      return "goes on without its accuser";
    case Cause::kEnded:
      return "ended";
    case Cause::kSuspects:
      return "suspects members";
    case Cause::kSeatTaken:
      return "another process gets the rank";
  }
  return "?";
}

std::string listOf(const JobRanks& ranks) {
  std::vector<int> list;
  ranks.forEach([&](int rank) { list.push_back(rank); });
  return nameRanks(list);
}

std::string whoContinues(const View& view) {
  return "; " + listOf(view.active) + (view.active.count() == 1 ? " continues" : " continue") +
         ", epoch " + std::to_string(view.epoch);
}

std::string nowInWords() {
  const std::time_t now = std::time(nullptr);
  std::tm parts{};
  ::gmtime_r(&now, &parts);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y-%m-%dT%H:%M:%SZ", &parts);
  return text.data();
}

}  // namespace mooncake
