#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace mooncake {

// How an engine leaves, in its own words.
struct Farewell {
  enum class How : uint8_t {
    kDestroyed = 1,  // the job was destroyed on this rank: the others go on without it
    kEnded,          // it destroyed nothing: its program came to its end, or as `why` says
    kFailed,         // the program ends by an error: nothing that it did may be counted on
  };
  How how = How::kDestroyed;
  std::string why;  // one line; not for kDestroyed
};

// What this rank saw of a peer's end, or of what may be its end. An observation, never membership
// by itself: what follows from it is for those to say who know the group (docs/membership.md).
struct Evidence {
  enum class Kind {
    kGoodbye,      // it left in peace; accuses nobody
    kEnded,        // the same, but it destroyed nothing: who needs it afterwards has lost it
    kFailed,       // certain: it said that it ends by an error. Its last report came before
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
    case Evidence::Kind::kEnded:
      return "ended";
    case Evidence::Kind::kFailed:
      return "failed";
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
