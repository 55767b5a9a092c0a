#pragma once

#include <chrono>
#include <string>

namespace mooncake {

// What this rank saw of the end of a peer. An observation, never membership by itself: what follows
// from it is for those to say who know the group (docs/membership.md).
struct Evidence {
  enum class Kind {
    kGoodbye,      // it left in peace; accuses nobody
    kExited,       // certain: its own kernel says that the process has ended, or cannot go on
    kUnreachable,  // the connection broke; the process may live
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
  }
  return "?";
}

}  // namespace mooncake
