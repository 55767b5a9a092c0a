#pragma once

#include <array>
#include <csignal>

namespace mooncake {

// Puts back the program's signal handlers: libraries that it opens may take them (libpsm2, which
// Debian's libfabric brings, those of crashes).
class KeptSignalHandlers {
 public:
  KeptSignalHandlers() {
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], nullptr, &before_[i]);
  }
  ~KeptSignalHandlers() {
    for (size_t i = 0; i < kSignals.size(); ++i) ::sigaction(kSignals[i], &before_[i], nullptr);
  }
  KeptSignalHandlers(const KeptSignalHandlers&) = delete;
  KeptSignalHandlers& operator=(const KeptSignalHandlers&) = delete;

 private:
  static constexpr std::array kSignals = {SIGSEGV, SIGBUS,  SIGILL, SIGABRT, SIGFPE,
                                          SIGINT,  SIGTERM, SIGHUP, SIGPIPE, SIGCHLD};
  std::array<struct sigaction, kSignals.size()> before_{};
};

}  // namespace mooncake
