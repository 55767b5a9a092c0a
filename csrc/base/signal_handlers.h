#pragma once

#include <array>
#include <csignal>

namespace mooncake {

// Restores the program's signal handlers when it goes out of scope, because a library that we open
// may replace them. Example: libpsm2, a dependency of Debian's libfabric, takes the signals of
// crashes.
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
