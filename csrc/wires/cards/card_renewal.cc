#include "wires/cards/card_renewal.h"

#include <vector>

#include "base/log.h"

namespace mooncake {
namespace {

constexpr size_t kCompletions = 64;  // taken in one call
// How long a closed card may take to end its operations.
constexpr auto kClosing = std::chrono::seconds(5);
// Pause after a card could not be opened anew.
constexpr auto kReopenPause = std::chrono::milliseconds(500);

}  // namespace

bool CardRenewal::renewWhereDue() {
  if (rail_.mustClose()) {
    close();
    reopenAt_ = Clock::now();
  }
  if (!rail_.isClosed() || !reopen_ || Clock::now() < reopenAt_) return false;
  if (reopen()) return true;
  reopenAt_ = Clock::now() + kReopenPause;
  return false;
}

void CardRenewal::close() {
  if (rail_.close()) endAll();
}

void CardRenewal::endAll() {
  std::vector<NicCompletion> room(kCompletions);
  for (const auto deadline = Deadline::after(kClosing); !rail_.isIdle();) {
    if (rail_.serve(room, sinks_) > 0) continue;
    if (deadline.passed()) {
      log(LogLevel::kWarning, "fabric", "card ", rail_.name(),
          " does not end operations that are under way");
      break;
    }
    rail_.nic().wait(Deadline::after(std::chrono::microseconds(100)));
  }
  rail_.endAbandoned();
  rail_.feed();
}

bool CardRenewal::reopen() {
  const auto fails = [&](const Error& why) {
    log(LogLevel::kWarning, "fabric", "card ", rail_.name(),
        " cannot be opened anew: ", why.message);
    return false;
  };
  auto made = reopen_(rail_.index());
  if (!made.ok()) return fails(made.error());
  auto sending = sending_.registerWith(**made);
  if (!sending.ok()) return fails(sending.error());
  auto receiving = rail_.receiving().registerWith(**made);
  if (!receiving.ok()) return fails(receiving.error());
  // The old card lives on for as long as memory is registered with it.
  rail_.reopen(std::move(*made), sending_, std::move(*sending), std::move(*receiving));
  log(LogLevel::kInfo, "fabric", "card ", rail_.name(), " was closed, and opened anew");
  return true;
}

}  // namespace mooncake
