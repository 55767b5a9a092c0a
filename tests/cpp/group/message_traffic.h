#pragma once

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "collectives/mailbox.h"
#include "collectives/point_to_point.h"
#include "draw.h"

namespace mooncake::test {

// A process's account of its messages, in memory that it shares with the test.
struct TrafficLog {
  std::atomic<uint32_t> sent, received, lost;  // numbers of messages
  std::atomic<uint32_t> crossed;               // of received ones, sent in an earlier series
  std::atomic<uint32_t> whole;  // a bit per rank: all of its messages have come, to the last one
  char wrong[400];              // the first message that came twice, or is not as it was sent
  char failed[400];             // the first one that failed, though neither rank was lost
};

// Point-to-point messages of one process with all other ranks, while the line moves. They are
// numbered for each pair of processes and each tag, from 1 on. So each receive knows its message.
// Some receives are held back, so that messages lie in mailboxes, or are announced and not fetched,
// when the line moves.
//
// A thread of its own sends and receives. begin() and move() are for the thread that moves the line.
class MessageTraffic {
 public:
  struct Options {
    uint64_t seed;
    int rank, life, size;
    int ahead;  // most sends of a stream that are under way
  };
  MessageTraffic(const Options& options, TrafficLog& log)
      : options_(options),
        log_(log),
        draw_(mix(options.seed * 31 + size_t(options.rank) * 10 + size_t(options.life))),
        pairs_(size_t(options.size)) {}
  ~MessageTraffic() { close(); }

  void begin(Group& group) {
    messages_ = std::make_unique<PointToPoint>(group);
    for (Pair& pair : pairs_) pair.meeting = group.topic();
    series_ = group.topic();
    thread_ = std::thread([this] { run(); });
  }
  void move(Group& to, const std::vector<bool>& stays) {
    if (!messages_) return begin(to);
    std::lock_guard lock(mutex_);
    if (!stays[size_t(options_.rank)]) return beginAnew(to);
    messages_->move(to, stays);
    series_ = to.topic();
    for (size_t r = 0; r < pairs_.size(); ++r) {
      Pair& pair = pairs_[r];
      pair.isHeld = pair.isHeld && !pair.untilMove;
      if (stays[r]) continue;
      for (const auto& sent : pair.out) retire(sent.posted);
      for (const auto& in : pair.in) retire(in.posted);
      pair = Pair{.meeting = to.topic()};
      log_.whole &= ~(1u << r);
      for (FromAny& any : fromAny_) {
        for (Posted& one : any.posted) one.isStale |= one.message->peer() == int(r);
      }
    }
  }

  // Sends the last messages, and waits until the last ones of all other ranks have come, and ours are
  // taken. Returns the peers that are missing at the deadline.
  std::string finish(Deadline deadline) {
    if (!messages_) return "";
    isEnding_ = true;
    for (;;) {
      std::string missing;
      {
        std::lock_guard lock(mutex_);
        if (isOver_) return "";
        for (int r = 0; r < options_.size; ++r) {
          if (r != options_.rank && !isDone(pairs_[size_t(r)])) missing += stateOf(r);
        }
      }
      if (missing.empty()) return "";
      if (deadline.passed()) return "messages do not end:" + missing;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }
  // Ends all messages. The group may go afterwards.
  bool close() {
    isClosed_ = true;
    if (thread_.joinable()) thread_.join();
    if (!messages_) return true;
    messages_->abort({ErrorCode::kAborted, "the case is over"});
    const bool isClosed = messages_->close(Deadline::after(std::chrono::seconds(10)));
    messages_.reset();
    return isClosed;
  }

 private:
  // Tags: of messages between two ranks, small ones and ones of all sizes; of messages that any
  // rank's receive takes, small and large ones.
  static constexpr uint32_t kDirectTags = 2, kAnyTags = 2, kTags = kDirectTags + kAnyTags;
  static constexpr auto kPatience = std::chrono::seconds(120);  // longer than a case

  struct Head {
    uint64_t seed, meeting, series, from, life, to, tag, number, isLast;
  };
  struct Posted {
    std::shared_ptr<Message> message;
    std::shared_ptr<std::vector<uint64_t>> data;
    uint64_t number = 0;   // 0: of any source
    bool isStale = false;  // of any source: it came from a process that is gone
  };
  struct Stream {
    uint64_t next = 1;  // number of the next message that is posted
    std::deque<Posted> posted;
    bool hasLast = false;  // the last message has been posted, or has come
    bool isLost = false;   // no more comes, as the peer is lost
  };
  struct FromAny {
    std::deque<Posted> posted;
    bool isLost = false;  // no other rank is left, and all of their messages have come
  };
  struct Pair {
    uint64_t meeting = 0;  // where the two processes met
    Stream out[kTags] = {};
    Stream in[kDirectTags] = {};
    uint64_t fromAny[kAnyTags] = {};  // number of the last message that came
    bool hasAnyLast[kAnyTags] = {};
    uint64_t life = 0;  // 1 + the peer's life, once a message has come
    bool isLost = false;
    bool gaveUp = false;  // one of its messages
    int looksSinceLost = 0;
    bool isHeld = false, untilMove = false;  // no receive is posted
    Clock::time_point heldUntil = {};

    bool isWhole() const {
      return std::ranges::all_of(in, &Stream::hasLast) &&
             std::ranges::all_of(hasAnyLast, [](bool one) { return one; });
    }
  };

  // In bytes. Both sides know it before the message comes.
  static size_t sizeOf(int from, int to, uint32_t tag, uint64_t number) {
    constexpr size_t kSizes[] = {sizeof(Head),     256,    kCellPayload, kCellPayload + 8,
                                 kCellPayload * 2, 40'000, 200'000};
    Draw draw(mix(number * 1000 + size_t(from) * 100 + size_t(to) * 10 + tag));
    if (tag == 0) return sizeof(Head) + 8 * size_t(draw.below(20));
    if (tag == 1) return draw.oneOf(kSizes);
    return tag == 2 ? sizeof(Head) + 32 : kCellPayload + 3000;
  }
  static void fill(std::vector<uint64_t>& words, const Head& head) {
    std::memcpy(words.data(), &head, sizeof(head));
    const uint64_t key = mix(head.meeting ^ mix(head.from * 1000 + head.to * 100 + head.tag * 10) ^
                             mix(head.number + head.life * 1'000'000));
    for (size_t i = sizeof(Head) / 8; i < words.size(); ++i) words[i] = mix(key + i);
  }

  // Nothing more comes from this rank, nor goes to it.
  bool isDone(const Pair& pair) const {
    const auto isTaken = [](const Stream& one) { return one.hasLast && one.posted.empty(); };
    const auto isOver = [](const Stream& one) {
      return one.hasLast || (one.isLost && one.posted.empty());
    };
    const auto hasNone = [](const FromAny& one) {
      return one.isLost || (!one.posted.empty() && !one.posted.front().message->finished());
    };
    const bool hasLeft = pair.looksSinceLost > 2 && std::ranges::all_of(pair.in, isOver) &&
                         std::ranges::all_of(fromAny_, hasNone);
    return std::ranges::all_of(pair.out, isTaken) && (pair.isWhole() || hasLeft);
  }

  std::string stateOf(int r) const {
    const Pair& pair = pairs_[size_t(r)];
    std::string text = " rank " + std::to_string(r) + (pair.isLost ? ", lost:" : ":");
    for (uint32_t tag = 0; tag < kTags; ++tag) {
      const Stream& out = pair.out[tag];
      if (!out.posted.empty() || !out.hasLast)
        text += " to it with tag " + std::to_string(tag) + ' ' + std::to_string(out.posted.size()) +
                " up to number " + std::to_string(out.next - 1) + ',';
      const bool isAny = tag >= kDirectTags;
      const uint64_t came = isAny ? pair.fromAny[tag - kDirectTags]
                                  : pair.in[tag].next - 1 - pair.in[tag].posted.size();
      if (!(isAny ? pair.hasAnyLast[tag - kDirectTags] : pair.in[tag].hasLast))
        text += " from it with tag " + std::to_string(tag) + " after number " +
                std::to_string(came) + ',';
    }
    return text;
  }

  void run() {
    while (!isClosed_) {
      {
        std::lock_guard lock(mutex_);
        if (!isOver_) look();
      }
      std::this_thread::sleep_for(std::chrono::microseconds(500));
    }
  }

  // With the lock held. This rank was taken out of its group, and `to` has it alone; or it comes back.
  void beginAnew(Group& to) {
    const Status usable = to.usable();
    messages_->abort(usable.ok() ? Error{ErrorCode::kAborted, "the rank comes back"}
                                 : usable.error());
    for (int r = 0; r < options_.size; ++r) {
      Pair& pair = pairs_[size_t(r)];
      pair.isLost = true;  // a receive from any rank may have failed before one that has ended well
      for (auto& out : pair.out) endAll(out.posted, [](const Posted&) {});
      for (uint32_t tag = 0; tag < kDirectTags; ++tag)
        endAll(pair.in[tag].posted, [&](const Posted& one) { check(r, pair, tag, one); });
    }
    for (uint32_t i = 0; i < kAnyTags; ++i) {
      endAll(fromAny_[i].posted, [&](const Posted& one) {
        const int from = one.message->peer();
        if (!one.isStale) check(from, pairs_[size_t(from)], kDirectTags + i, one);
      });
      fromAny_[i] = {};
    }
    if (!messages_->close(Deadline::after(std::chrono::seconds(10))))
      wrong("a thread stays in a message");
    messages_ = std::make_unique<PointToPoint>(to);
    for (Pair& pair : pairs_) pair = Pair{.meeting = to.topic()};
    series_ = to.topic();
    log_.whole = 0;
    isAlone_ = !usable.ok();
    if (!isAlone_) return;
    const int next = (options_.rank + 1) % options_.size;
    for (const Posted& one : {receive(next, 0, sizeof(Head)), give(next, sizeof(Head))}) {
      const Status& status = one.message->status();
      if (!one.message->finished() || status.code() != usable.code() ||
          status.error().message != usable.error().message)
        wrong("a message of a rank that was taken out is not refused");
    }
  }
  // All messages of a rank that goes to another group have ended.
  template <typename Check>
  void endAll(std::deque<Posted>& posted, const Check& check) {
    for (const Posted& one : posted) {
      if (!one.message->finished()) return wrong("a message goes on in a group that is gone");
      const bool isOk = one.message->status().ok();
      log_.lost += !isOk;
      if (isOk && !isOver_) check(one);
    }
    posted.clear();
  }

  // All with the lock held. Once a message has ended because this rank is out, the next ones may have
  // come and earlier ones not: no more are looked at.
  void look() {
    if (isAlone_) return;
    messages_->progress();
    for (int r = 0; r < options_.size; ++r) {
      if (r != options_.rank) look(r, pairs_[size_t(r)]);
    }
    // More are taken than sent, so that none pile up.
    for (int times = 0; times < 8; ++times) {
      for (uint32_t i = 0; i < kAnyTags; ++i) lookAtAny(i);
    }
  }

  void look(int r, Pair& pair) {
    pair.looksSinceLost += pair.isLost;
    for (uint32_t tag = 0; tag < kTags; ++tag) {
      Stream& out = pair.out[tag];
      while (!out.posted.empty() && out.posted.front().message->finished()) {
        ended(&pair, *out.posted.front().message);
        out.posted.pop_front();
      }
      const bool isLast = isEnding_;
      const int most = pair.isLost ? 1 : options_.ahead;
      if (out.hasLast || int(out.posted.size()) >= most + isLast) continue;
      if (isLast || draw_.chance(pair.isLost ? 3 : 20)) send(r, pair, tag, isLast);
    }
    const auto now = Clock::now();
    if (pair.isHeld && now >= pair.heldUntil) pair.isHeld = false;
    if (!pair.isHeld && draw_.chance(2)) {
      pair.isHeld = true;
      pair.untilMove = draw_.chance(50);
      pair.heldUntil =
          now + std::chrono::milliseconds(10 + draw_.below(pair.untilMove ? 2000 : 90));
    }
    if (isEnding_) pair.isHeld = false;
    for (int times = 0; times < 4; ++times) {
      for (uint32_t tag = 0; tag < kDirectTags; ++tag) lookAt(r, pair, tag);
    }
  }

  void lookAt(int r, Pair& pair, uint32_t tag) {
    Stream& in = pair.in[tag];
    while (!isOver_ && !in.posted.empty() && in.posted.front().message->finished()) {
      const Posted first = std::move(in.posted.front());
      in.posted.pop_front();
      if (ended(&pair, *first.message)) {
        check(r, pair, tag, first);
      } else if (isEnding_) {
        in.isLost = true;
      }
    }
    if (pair.isHeld || int(in.posted.size()) >= (pair.isLost ? 1 : 3)) return;
    if (in.hasLast || in.isLost || !(isEnding_ || draw_.chance(pair.isLost ? 1 : 30))) return;
    in.posted.push_back(receive(r, tag, sizeOf(r, options_.rank, tag, in.next)));
    in.posted.back().number = in.next++;
  }

  void lookAtAny(uint32_t i) {
    auto& posted = fromAny_[i].posted;
    while (!isOver_ && !posted.empty() && posted.front().message->finished()) {
      const Posted first = std::move(posted.front());
      posted.pop_front();
      const Message& message = *first.message;
      if (first.isStale) continue;
      const int from = message.peer();
      Pair* const pair = from < 0 ? nullptr : &pairs_[size_t(from)];
      fromAny_[i].isLost = from < 0;
      if (ended(pair, message)) check(from, *pair, kDirectTags + i, first);
    }
    if (posted.size() >= 2 || !(isEnding_ || draw_.chance(10))) return;
    posted.push_back(
        receive(PointToPoint::kAnySource, kDirectTags + i, sizeOf(0, 0, kDirectTags + i, 0)));
  }

  void send(int to, Pair& pair, uint32_t tag, bool isLast) {
    Stream& out = pair.out[tag];
    const uint64_t number = out.next++;
    auto data = std::make_shared<std::vector<uint64_t>>(sizeOf(options_.rank, to, tag, number) /
                                                        sizeof(uint64_t));
    fill(*data, {options_.seed, pair.meeting, series_, uint64_t(options_.rank),
                 uint64_t(options_.life), uint64_t(to), tag, number, isLast});
    out.hasLast = isLast;
    auto message = messages_->send(std::as_bytes(std::span(*data)), to, tag,
                                   Deadline::after(kPatience), nullptr, data);
    out.posted.push_back({std::move(message), std::move(data), number});
    ++log_.sent;
  }
  Posted give(int to, size_t bytes) {
    auto data = std::make_shared<std::vector<uint64_t>>(bytes / sizeof(uint64_t));
    auto message = messages_->send(std::as_bytes(std::span(*data)), to, 0,
                                   Deadline::after(kPatience), nullptr, data);
    return {std::move(message), std::move(data), 0};
  }
  Posted receive(int from, uint32_t tag, size_t bytes) {
    auto data = std::make_shared<std::vector<uint64_t>>(bytes / sizeof(uint64_t));
    auto message = messages_->receive(std::as_writable_bytes(std::span(*data)), from, tag,
                                      Deadline::after(kPatience), nullptr, data);
    return {std::move(message), std::move(data), 0};
  }

  // Returns whether the message has come, or has been taken.
  bool ended(Pair* pair, const Message& message) {
    if (message.status().ok()) return true;
    ErrorCode code = message.status().code();
    // The sender is out, and its loss follows.
    if (code == ErrorCode::kRefused && pair) {
      pair->gaveUp = true;
      code = ErrorCode::kPeerLost;
    }
    switch (code) {
      case ErrorCode::kPeerLost:
        if (pair) pair->isLost = true;
        ++log_.lost;
        break;
      case ErrorCode::kEvicted:
      case ErrorCode::kMinority:
        isOver_ = true;
        break;
      default:
        isOver_ = true;
        note(log_.failed, message.status().error().message);
    }
    return false;
  }
  void retire(const std::deque<Posted>& posted) {
    for (const Posted& one : posted) {
      if (!one.message->finished()) wrong("a message to a process that is gone goes on");
    }
  }
  // Checks a message that has come.
  void check(int from, Pair& pair, uint32_t tag, const Posted& posted) {
    Head head;
    std::memcpy(&head, posted.data->data(), sizeof(head));
    std::vector<uint64_t> expected(posted.data->size());
    const bool isAny = tag >= kDirectTags;
    uint64_t number = isAny ? pair.fromAny[tag - kDirectTags] + 1 : posted.number;
    // The receive that took an earlier one has failed.
    if (isAny && pair.isLost) number = std::max(number, head.number);
    const std::string name = "message " + std::to_string(number) + " of rank " +
                             std::to_string(from) + " with tag " + std::to_string(tag);
    if (head.number != number || head.tag != tag || int(head.from) != from ||
        int(head.to) != options_.rank || head.seed != options_.seed)
      return wrong(name + " is number " + std::to_string(head.number) + " of rank " +
                   std::to_string(head.from) + " to rank " + std::to_string(head.to) +
                   " with tag " + std::to_string(head.tag));
    if (head.meeting != pair.meeting) return wrong(name + " is of another process");
    if (pair.life != 0 && pair.life != head.life + 1)
      return wrong(name + " is of life " + std::to_string(head.life));
    fill(expected, head);
    if (expected != *posted.data) return wrong(name + " has other contents");
    pair.life = head.life + 1;
    ++log_.received;
    if (head.series != series_) ++log_.crossed;
    if (isAny) pair.fromAny[tag - kDirectTags] = head.number;
    bool& hasLast = isAny ? pair.hasAnyLast[tag - kDirectTags] : pair.in[tag].hasLast;
    if (hasLast) return wrong(name + " comes after the last one");
    hasLast = head.isLast;
    if (pair.isWhole() && !pair.gaveUp) log_.whole |= 1u << from;
  }
  void wrong(const std::string& text) {
    isOver_ = true;
    note(log_.wrong, text);
  }
  static void note(char (&place)[400], const std::string& text) {
    if (!place[0]) std::snprintf(place, sizeof(place), "%s", text.c_str());
  }

  const Options options_;
  TrafficLog& log_;
  Draw draw_;
  std::mutex mutex_;
  std::unique_ptr<PointToPoint> messages_;
  bool isAlone_ = false;       // taken out
  uint64_t series_ = 0;        // topic of the series that this rank is in
  std::vector<Pair> pairs_;    // by rank
  FromAny fromAny_[kAnyTags];  // by tag
  std::atomic<bool> isEnding_{false}, isClosed_{false}, isOver_{false};
  std::thread thread_;
};

}  // namespace mooncake::test
