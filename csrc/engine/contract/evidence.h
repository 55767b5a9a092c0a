#pragma once

#include <chrono>
#include <cstdint>
#include <string>

namespace mooncake {

// How an engine leaves, as its own process says.
struct Farewell {
  enum class How : uint8_t {
    kDestroyed = 1,  // the job was destroyed on this rank; the other ranks go on without it
    kEnded,          // nothing was destroyed: the program ended, or `why` gives the reason
    kFailed,         // the program ends by an error: do not rely on anything that it did
  };
  How how = How::kDestroyed;
  std::string why;  // one line; not for kDestroyed
};

// What this rank saw of a peer's end, or of a sign of it. It is an observation, never a decision on
// membership: the membership layer draws the conclusions (docs/membership.md).
struct Evidence {
  enum class Kind {
    kGoodbye,      // it left in peace; no accusation
    kEnded,        // the same, but without destroy: ranks that still need it have lost it
    kFailed,       // certain: it said that it ends by an error, after its last report
    kExited,       // certain: its own kernel says that the process has ended or cannot go on
    kUnreachable,  // the connection broke; the process may live
    kRefused,      // the connection broke, and nothing listens at the peer's address any more
    kSilent,       // no sign of it for the failure timeout; it may only be slow
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
