#pragma once

#include <chrono>
#include <string>

namespace mooncake {

// What this rank saw of a peer's end, or of what may be its end. An observation, never membership
// by itself: what follows from it is for those to say who know the group (docs/membership.md).
struct Evidence {
  enum class Kind {
    kGoodbye,      // it left in peace; accuses nobody
    kExited,       // certain: its own kernel says that the process has ended, or cannot go on
    kUnreachable,  // the connection broke; the process may live
    kRefused,      // the connection broke, and where it listened nobody does any more
    kSilent,       // nothing was heard of it for the failure timeout; it may only be slow
  };
  Kind kind = Kind::kUnreachable;
  std::string detail;  // one line for the log
  std::chrono::steady_clock::time_point when = std::chrono::steady_clock::now();

  bool isGoodbye() const { return kind == Kind::kGoodbye; }
};

inline const char* evidenceKindName(Evidence::Kind kind) {
  switch (kind) {
    case Evidence::Kind::kGoodbye:
      return "goodbye";
    case Evidence::Kind::kExited:
      return "exited";
    case Evidence::Kind::kUnreachable:
      return "unreachable";
    case Evidence::Kind::kRefused:
      return "refused";
    case Evidence::Kind::kSilent:
      return "silent";
  }
  return "?";
}

}  // namespace mooncake
