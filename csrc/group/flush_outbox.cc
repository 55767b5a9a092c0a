#include "group/flush_outbox.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/failpoint.h"
#include "base/log.h"

namespace mooncake {

void FlushOutbox::carryOut(Mutex& mutex) {
  if (isActing_) return;
  isActing_ = true;
  while (!due_.empty()) {
    auto due = std::exchange(due_, {});
    std::vector<Letter> unsent;
    {
      const UnlockedScope unlocked(mutex);
      for (Due& one : due) {
        if (auto to = perform(one); !to.empty())
          unsent.push_back({std::move(to), std::move(std::get<Letter>(one).message), true});
      }
    }
    std::ranges::move(unsent, std::back_inserter(unsent_));
  }
  isActing_ = false;
}

bool FlushOutbox::sendAgain() {
  if (unsent_.empty() && due_.empty() && !isActing_) return true;
  for (Letter& letter : std::exchange(unsent_, {})) due_.emplace_back(std::move(letter));
  return false;
}

void FlushOutbox::leave(const std::vector<int>& to, const std::vector<FlushMessage>& lastWords) {
  if (lastWords.empty()) return;
  std::vector<std::shared_ptr<Peer>> peers;
  for (const int r : to) {
    if (const auto& peer = roster_.peer(jobRanks_[size_t(r)])) peers.push_back(peer);
  }
  std::vector<Bytes> messages;
  for (const FlushMessage& message : lastWords) messages.push_back(encodeFlushMessage(message));
  membership_.engine().keepLastWords(peers, topic_, std::move(messages));
}

// Returns the ranks to which a farewell must be sent again. Other entries that are not sent are
// lost; the receivers ask for them again.
std::vector<int> FlushOutbox::perform(const Due& due) {
  Engine& engine = membership_.engine();
  std::vector<int> unsent;
  if (const auto* letter = std::get_if<Letter>(&due)) {
    for (const int r : letter->to) {
      failpoint("tell");
      // A rank that cannot be reached is soon out of the view, or connected anew.
      const auto& peer = roster_.peer(jobRanks_[size_t(r)]);
      const Status sent = engine.send(*peer, topic_, letter->message);
      if (letter->isFarewell && sent.code() == ErrorCode::kExhausted) unsent.push_back(r);
    }
  } else if (const auto* part = std::get_if<Part>(&due)) {
    failpoint("supply");
    owner_.putPart(part->copy, part->to);
  } else if (const auto* close = std::get_if<SeriesClose>(&due)) {
    owner_.onSeriesEnd(*close);
  } else {
    logLine(LogLevel::kDebug, engine.logName(), std::get<std::string>(due));
  }
  return unsent;
}

}  // namespace mooncake
