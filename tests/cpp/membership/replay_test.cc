// Replays random traces of the models in docs/models against the code. After every step both must
// have done the same. The slice beside this file is replayed by default. docs/models/run.sh
// --replay makes others (this needs spin) and names them in MOONCAKE_TEST_TRACES.
//
// A trace begins with a line "# model flags", the flags of spin, so that it can be made again, or
// with "# again": the same flags. Then comes a line for each step: its name, its rank, and the
// model's data. The tables kSteps below name the call for each step; docs/membership.md, section 8,
// describes them.
#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "membership/flush_machine.h"
#include "membership/view_agreement.h"

namespace mooncake {
namespace {

struct Line {
  explicit Line(const std::string& text) {
    std::istringstream in(text);
    in >> name;
    for (std::string field; in >> field;) fields.push_back(field);
  }
  int decimal(size_t i) const { return std::stoi(fields.at(i)); }
  int hex(size_t i) const { return std::stoi(fields.at(i), nullptr, 16); }

  std::string name;
  std::vector<std::string> fields;
};

bool says(const std::string& header, const std::string& flag) {
  return (header + " ").find(" " + flag + " ") != std::string::npos;
}

// ---- agreement.pml: ViewAgreement decides

JobRanks setOf(int mask) {
  JobRanks set;
  for (int r = 0; mask >> r != 0; ++r) {
    if ((mask >> r & 1) != 0) set.add(r);
  }
  return set;
}

template <typename Numbering>
int maskOf(const RankSetOf<Numbering>& set) {
  int mask = 0;
  set.forEach([&](int rank) { mask |= 1 << rank; });
  return mask;
}

// Encodes a report as the model does.
int wordOf(const ViewReport& report) {
  return maskOf(report.committed) | maskOf(report.gone) << 4 | maskOf(report.settled) << 8 |
         maskOf(report.suspected) << 12;
}

class ViewReplay {
 public:
  explicit ViewReplay(int ranks) : all_(JobRanks::firstRanks(ranks)) {
    for (int r = 0; r < ranks; ++r) ranks_.emplace_back(r, View{1, all_});
  }

  struct Step {
    const char* name;
    void (ViewReplay::*play)(const Line&, int me, int other);
  };
  static const Step kSteps[];

  void play(const Step& step, const std::vector<Line>& lines, size_t at) {
    (this->*step.play)(lines[at], lines[at].decimal(0), lines[at].decimal(1));
  }

 private:
  // Two clocks in one: no grace ends before `give-up-on`.
  static constexpr ViewAgreement::Timing kTiming{.grace = std::chrono::hours(1),
                                                 .resend = std::chrono::milliseconds(1)};
  struct Rank {
    Rank(int self, const View& first) : machine(self, first, kTiming) {}

    ViewAgreement machine;
    Clock::time_point now{};
    std::map<int, Bytes> told;  // all that it ever reported, by the model's word for it
    JobRanks committed, out;    // as of its last call
  };

  void received(const Line& line, int me, int other) {
    const std::map<int, Bytes>& told = ranks_[other].told;
    const int word = line.hex(2);
    ViewReport report{.from = other};
    if (word != 0) {
      const auto found = told.find(word);
      ASSERT_NE(found, told.end()) << "the code never reported this";
      auto decoded = decodeViewReport(found->second, all_.end());
      ASSERT_TRUE(decoded.ok());
      report = std::move(*decoded);
    }
    Rank& rank = ranks_[me];
    const ViewActions actions = rank.machine.received(report, rank.now);
    if (actions.evicted) {
      EXPECT_EQ(actions.evicted->toldBy, other);
      EXPECT_EQ(actions.evicted->why.rank, me);
      EXPECT_EQ(actions.evicted->epoch, 1u + report.committed.count());
    }
    expectSame(line, me, actions);
  }
  void exited(const Line& line, int me, int other) {
    using LastReport = ViewAgreement::LastReport;
    const auto last = line.hex(2) != 0 ? LastReport::kReceived : LastReport::kUnknown;
    expectSame(line, me, ranks_[me].machine.exited({other}, last, ranks_[me].now));
  }
  void left(const Line& line, int me, int other) {
    expectSame(line, me, ranks_[me].machine.left(other, ranks_[me].now));
  }
  void suspected(const Line& line, int me, int) {
    expectSame(line, me,
               ranks_[me].machine.suspected(setOf(line.hex(2)), Cause::kSilent, ranks_[me].now));
  }
  void refused(const Line& line, int me, int) {
    expectSame(line, me,
               ranks_[me].machine.suspected(setOf(line.hex(2)), Cause::kRefused, ranks_[me].now));
  }
  void giveUpOn(const Line& line, int me, int) {
    ranks_[me].now += kTiming.grace;
    expectSame(line, me, ranks_[me].machine.tick(ranks_[me].now));
  }
  void tick(const Line& line, int me, int) {
    Rank& rank = ranks_[me];
    ASSERT_TRUE(rank.machine.nextTick());
    rank.now = std::max(rank.now, *rank.machine.nextTick());
    expectSame(line, me, rank.machine.tick(rank.now));
  }
  void send(const Line& line, int me, int) {
    EXPECT_EQ(wordOf(ranks_[me].machine.report()), line.hex(2));
  }
  // `me` is to receive this next, although older reports are still under way to it.
  void overtake(const Line& line, int, int other) {
    EXPECT_EQ(wordOf(ranks_[other].machine.report()), line.hex(2));
  }
  void nothing(const Line&, int, int) {}

  // Compares the actions of the code with those of the model, at the end of the line.
  void expectSame(const Line& line, int me, const ViewActions& actions) {
    Rank& rank = ranks_[me];
    const int told = line.hex(4), how = line.decimal(6);
    const JobRanks sendTo = setOf(line.hex(3)), committed = setOf(line.hex(5));
    const ViewReport& report = rank.machine.report();
    EXPECT_EQ(maskOf(actions.sendTo), maskOf(sendTo)) << "to whom it reports";
    EXPECT_EQ(wordOf(report), told) << "what it reports";
    EXPECT_EQ(actions.minority, how == 1);
    EXPECT_EQ(actions.evicted.has_value(), how == 2);

    const View& view = rank.machine.view();
    EXPECT_EQ(maskOf(all_ - view.active), maskOf(committed)) << "its view";
    EXPECT_EQ(view.epoch, 1u + committed.count());
    EXPECT_EQ(actions.commit.has_value(), committed != rank.committed);
    if (actions.commit) {
      EXPECT_EQ(*actions.commit, view);
    }
    rank.committed = committed;

    const bool waits = how == 0 && (line.decimal(7) != 0 || report.out() != report.committed);
    EXPECT_EQ(rank.machine.nextTick().has_value(), waits) << "whether it waits for something";
    if (how == 0) {
      // Each is logged once.
      JobRanks accused;
      for (const Accusation& one : actions.accused) accused.add(one.rank);
      EXPECT_EQ(maskOf(accused), maskOf(report.out() - rank.out)) << "whom it accuses";
      rank.out = report.out();
    }
    rank.told.emplace(told, encodeViewReport(report));
  }

  const JobRanks all_;
  std::vector<Rank> ranks_;
};

// A step may map to several calls or to none, and a call may take several steps. Decisions of
// agreement.pml (`commit`, `evicted`...) are in the line of the call that makes them.
const ViewReplay::Step ViewReplay::kSteps[] = {
    {"received", &ViewReplay::received}, {"exited", &ViewReplay::exited},
    {"left", &ViewReplay::left},         {"suspected", &ViewReplay::suspected},
    {"refused", &ViewReplay::refused},   {"give-up-on", &ViewReplay::giveUpOn},
    {"tick", &ViewReplay::tick},         {"send", &ViewReplay::send},
    {"overtake", &ViewReplay::overtake}, {"lose", &ViewReplay::nothing},
    {"crash", &ViewReplay::nothing},     {"leave", &ViewReplay::nothing},
};

// ---- flush.pml: FlushMachine decides

// Drives a machine for each rank: its caller, and its messages, which wait until the model's rank
// has heard them. The model decides, adopts and acts in several steps, the machine in one. So the
// machine gets the last report when the model decides, if the model then acts. If the model drops
// the decision, the machine does not get it.
class FlushReplay {
 public:
  FlushReplay(int ranks, const std::string& header)
      : size_(ranks),
        raises_(says(header, "-DRAISE")),
        skips_(header.find(" -DSK=") != std::string::npos),
        moves_(header.find(" -DMV=") != std::string::npos),
        ranks_(size_t(ranks)) {
    for (int r = 0; r < size_; ++r) make(r, 0);
    for (int r = 0; r < size_ && moves_ && !says(header, "-DPREP"); ++r) prepare(r);
    if (says(header, "-DPRE=1")) ranks_.back().isAlive = false;
  }

  struct Step {
    const char* name;
    void (FlushReplay::*play)(const Line&, int me);
  };
  static const Step kSteps[];

  void play(const Step& step, const std::vector<Line>& lines, size_t at) {
    const Line& line = lines[at];
    const int me = line.decimal(0);
    rest_ = std::span(lines).subspan(at + 1);
    if (step.play != &FlushReplay::nothing) {
      EXPECT_EQ(ranks_[size_t(me)].k, line.decimal(1)) << "how many operations it has ended";
    }
    (this->*step.play)(line, me);
  }

  // How often each variation that the model does not have was played.
  static inline std::map<std::string, int> ways;

 private:
  using AbortReason = FlushReport::AbortReason;
  using Kind = FlushMessage::Kind;
  // The model's encoding of the end of an operation.
  enum Verdict { kAgain = 0, kOk = 16, kTimeout = 32, kLost = 48, kAbort = 80 };

  struct Letter {
    int to;
    FlushMessage message;
  };
  struct Rank {
    std::unique_ptr<FlushMachine> machine;
    Clock::time_point now{};
    uint64_t k = 0;      // number of operations that it has ended
    uint64_t begun = 0;  // last operation that it has begun
    uint64_t ended = 0;  // last operation that it has copied out, as the others see it
    bool isAlive = true;
    std::optional<FlushAction::GoOn>
        goOn;  // decision of the machine that the model has not acted on
    std::optional<Error> heeded;
    // Of the end of the series, as the model has it.
    bool isReady = false, wishes = false;
    std::optional<SeriesClose> decided, close;
  };
  static constexpr uint64_t kSuccessor = 7;

  static constexpr auto kResend = std::chrono::milliseconds(50);

  void make(int me, uint32_t lostBefore) {
    ranks_[size_t(me)].machine =
        std::make_unique<FlushMachine>(FlushMachine::Options{.group = "replay",
                                                             .rank = me,
                                                             .size = size_,
                                                             .raises = raises_,
                                                             .lostBefore = lostBefore,
                                                             .mostRounds = 100,
                                                             .resend = kResend});
  }
  FlushMachine& machine(int me) {
    Rank& rank = ranks_[size_t(me)];
    rank.machine->hasEnded(rank.ended);
    return *rank.machine;
  }
  // True every nth time, so that traces differ.
  bool isTurn(const char* way, int n) {
    const bool is = ++turns_ % n == 0;
    ways[way] += is ? 1 : 0;
    return is;
  }

  // Returns the machine's messages. Keeps its report and its farewell until they are heard.
  std::vector<Letter> take(int me, const FlushActions& actions) {
    std::vector<Letter> letters;
    for (const auto& action : actions) {
      if (const auto* goOn = std::get_if<FlushAction::GoOn>(&action)) {
        ranks_[size_t(me)].goOn = *goOn;
      } else if (const auto* failure = std::get_if<FlushAction::Fail>(&action)) {
        ADD_FAILURE() << failure->why.message;
      }
      const auto* tell = std::get_if<FlushAction::Tell>(&action);
      if (!tell) continue;
      auto arrived = decodeFlushMessage(encodeFlushMessage(tell->message), size_);
      if (!arrived.ok()) {
        ADD_FAILURE() << arrived.error().message;
        continue;
      }
      if (arrived->kind == Kind::kReport) reports_[{arrived->report.attempt, me}] = *arrived;
      if (arrived->kind == Kind::kLeft) left_[me] = *arrived;
      for (const int to : tell->to) letters.push_back({to, *arrived});
    }
    return letters;
  }
  std::vector<Letter> deliver(int from, int to, const FlushMessage& message) {
    FlushMachine& there = machine(to);
    return take(to, there.received(from, message, ranks_[size_t(to)].now));
  }
  // Answers go back at once.
  void ask(int me, int other, const FlushMessage& question) {
    for (const Letter& answer : deliver(me, other, question)) {
      EXPECT_EQ(answer.to, me);
      deliver(other, me, answer.message);
    }
  }
  // The other rank has left, in a view that has this rank.
  bool hasLeft(int other, int me) {
    return left_.contains(other) &&
           std::ranges::binary_search(ranks_[size_t(other)].machine->active(), me);
  }
  void hearThatLeft(int other, int me) {
    ASSERT_TRUE(left_.contains(other));
    deliver(other, me, left_[other]);
    if (isTurn("a farewell comes twice", 3)) deliver(other, me, left_[other]);
  }

  // -- the caller

  void nothing(const Line&, int) {}
  void made(const Line& line, int me) { make(me, static_cast<uint32_t>(line.decimal(2))); }
  void crash(const Line&, int me) { ranks_[size_t(me)].isAlive = false; }
  void begin(const Line&, int me) {
    const uint64_t number = ranks_[size_t(me)].k + 1;
    EXPECT_FALSE(machine(me).isFrozen());
    EXPECT_EQ(machine(me).leftOutOf().number, 0u);
    machine(me).begins(number);
    ranks_[size_t(me)].begun = number;
    const auto holders = [&] { return take(me, machine(me).askForSlot(number)); };
    for (const Letter& question : holders()) {
      const int other = question.to;
      if (ranks_[size_t(other)].isAlive) ask(me, other, question.message);
    }
    for (const Letter& question : holders()) {
      if (hasLeft(question.to, me)) hearThatLeft(question.to, me);
    }
    // The remaining holders are dead, which the model knows at once.
    for (const Letter& question : holders())
      EXPECT_FALSE(ranks_[size_t(question.to)].isAlive) << "the slot is not free";
  }
  void commit(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    ++rank.k;
    const auto verdict = static_cast<Verdict>(line.decimal(2));
    if (verdict == kOk) return;
    rank.machine->endsWith(rank.k, errorOf(verdict, 0));
    rank.ended = rank.k;
  }
  void commitDone(const Line& line, int me) {
    commit(line, me);
    ranks_[size_t(me)].ended = ranks_[size_t(me)].k;
  }
  void copyOut(const Line&, int me) { ranks_[size_t(me)].ended = ranks_[size_t(me)].k; }
  void gone(const Line& line, int me) {
    take(me, machine(me).leave());
    if (!left_.contains(me)) {  // no rank is left to hear it
      left_[me] = {.kind = Kind::kLeft, .report = {.from = me}};
      return;
    }
    const FlushReport& last = left_[me].report;
    EXPECT_EQ(last.ended, ranks_[size_t(me)].k);
    EXPECT_EQ(last.attempt, attemptIn(line)) << "what it reported for";
    EXPECT_EQ(last.isOld, line.decimal(4) != 0);
    if (ranks_[size_t(me)].close) {
      EXPECT_EQ(last.closing, ranks_[size_t(me)].close);
    }
  }

  // -- the end of the series

  // All that live hear of it at once.
  void prepare(int me) {
    ranks_[size_t(me)].isReady = true;
    const auto actions = machine(me).readyFor(kSuccessor);
    ASSERT_TRUE(actions);
    for (const Letter& letter : take(me, *actions)) {
      if (ranks_[size_t(letter.to)].isAlive) deliver(me, letter.to, letter.message);
    }
  }
  void prepared(const Line&, int me) { prepare(me); }
  void wishToMove(const Line&, int me) {
    Rank& rank = ranks_[size_t(me)];
    rank.wishes = true;
    machine(me).wishesFor(kSuccessor, rank.now);
  }
  // The close that the model decides with this line.
  std::optional<SeriesClose> closeIn(int me) const {
    if (rest_.empty() || rest_[0].name != "closes" || rest_[0].decimal(0) != me)
      return std::nullopt;
    return SeriesClose{kSuccessor, uint64_t(rest_[0].decimal(2))};
  }
  void moved(const Line&, int me) {
    const Rank& rank = ranks_[size_t(me)];
    EXPECT_FALSE(rank.machine->isFrozen());
    ASSERT_TRUE(rank.machine->close());
    EXPECT_EQ(rank.machine->close(), rank.close);
    EXPECT_LE(rank.close->number, rank.k);
    EXPECT_FALSE(rank.machine->wantsToMove());
  }

  // -- the beginning of a flush

  void expectFrozen(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    EXPECT_TRUE(rank.machine->isFrozen());
    EXPECT_EQ(rank.machine->target(), attemptIn(line));
    EXPECT_FALSE(rank.goOn) << "what was decided is not done yet";
  }
  void startRound(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    const bool isWished = !rest_.empty() && rest_[0].name == "abort" && rest_[0].decimal(0) == me;
    const int other = (me + 1) % size_;
    if (moves_ && !isWished) {
      EXPECT_TRUE(rank.wishes && areReady(me));
      askTheUnready(me);
      take(me, machine(me).move(rank.now));
    } else if (!isWished && rank.machine->isActive(other) &&
               isTurn("a connection is made again", 2)) {
      take(me, machine(me).reconnected(other, true, rank.now));
    } else {
      take(me, machine(me).parked(rank.k + 1, AbortReason::kNone, {}, rank.now));
    }
    expectFrozen(line, me);
  }
  // Returns the questions that become due first: there are timers for reports and for readiness.
  std::vector<Letter> tick(int me) {
    Rank& rank = ranks_[size_t(me)];
    std::vector<Letter> questions;
    for (int ticks = 0; questions.empty() && ticks < 3 && rank.machine->nextTick(); ++ticks) {
      rank.now = std::max(rank.now, *rank.machine->nextTick());
      questions = take(me, machine(me).tick(rank.now));
    }
    EXPECT_FALSE(questions.empty());
    return questions;
  }
  // A report that a member made before it was ready has come behind the word that it is.
  void askTheUnready(int me) {
    if (machine(me).wantsToMove()) return;
    for (const Letter& question : tick(me)) {
      EXPECT_EQ(question.message.kind, Kind::kAsk);
      ask(me, question.to, question.message);
    }
  }
  bool areReady(int me) const {
    const std::vector<int>& active = ranks_[size_t(me)].machine->active();
    return std::ranges::all_of(active, [&](int r) {
      return ranks_[size_t(r)].isReady || !ranks_[size_t(me)].machine->isActive(r);
    });
  }
  void missLeaver(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    if (!std::ranges::binary_search(rank.machine->left(), line.decimal(4)))
      hearThatLeft(line.decimal(4), me);
    EXPECT_TRUE(rank.machine->hasLeaver());
    EXPECT_TRUE(rank.machine->missesLeaver(rank.k + 1));
    take(me, machine(me).parked(rank.k + 1, AbortReason::kNone, {}, rank.now));
    expectFrozen(line, me);
  }
  void see(const Line& line, int me) {
    const int out = line.decimal(5) & 15, left = line.decimal(5) >> 4;
    FlushView view{.epoch = 1};
    for (int r = 0; r < size_; ++r) {
      if ((out >> r & 1) == 0) {
        view.active.push_back(r);
        continue;
      }
      ++view.epoch;
      if ((left >> r & 1) == 0) view.losses.push_back({r, "it is gone"});
    }
    take(me, machine(me).viewed(view, ranks_[size_t(me)].now));
  }
  void newView(const Line& line, int me) {
    see(line, me);
    expectFrozen(line, me);
  }
  void join(const Line& line, int me) {
    const int other = line.decimal(4);
    const auto found = reports_.find({attemptIn(line), other});
    ASSERT_NE(found, reports_.end());
    FlushMessage message = found->second;
    if (isTurn("a flush is joined by a question", 2)) message.kind = Kind::kRepeat;
    const bool isViewLater = isTurn("a report comes before its view", 2);
    if (!isViewLater) see(line, me);
    deliver(other, me, message);
    if (isViewLater) see(line, me);
    expectFrozen(line, me);
  }
  void abort(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    const auto abort = static_cast<AbortReason>(line.decimal(2));
    const Error why = errorOf(abort == AbortReason::kTimeout ? kTimeout : kAbort, me);
    take(me, machine(me).parked(rank.k + 1, abort, why, rank.now));
  }

  void wish(const Line&, int me) {
    EXPECT_TRUE(machine(me).wantsReport());
    machine(me).wishesToSkip(ranks_[size_t(me)].k + 1);
  }
  // This rank was left out of the operation, and all others have ended it.
  void skipped(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    ++rank.k;
    EXPECT_EQ(machine(me).leftOutOf().number, rank.k);
    take(me, machine(me).skipped());
    rank.ended = rank.k;
    expectSkipped(rank, line.decimal(3));
  }
  static void expectSkipped(Rank& rank, int contributors) {
    EXPECT_EQ(rank.machine->ended(), rank.k);
    const auto skipped = rank.machine->takeSkipped(rank.k);
    ASSERT_TRUE(skipped) << "it ended without this rank";
    EXPECT_EQ(maskOf(skipped->contributors), contributors);
  }

  // -- the flush

  void heedLeaver(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    for (int r = 0; r < size_; ++r) {
      if (r != me && hasLeft(r, me)) hearThatLeft(r, me);
    }
    rank.heeded = errorOf(static_cast<Verdict>(line.decimal(2)), line.decimal(3));
    ++rank.k;
  }
  void report(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    const Attempt target = attemptIn(line);
    EXPECT_TRUE(machine(me).wantsReport());
    const auto letters = take(me, machine(me).stopped());
    // A rank that is alone sends no report.
    const auto found = reports_.find({target, me});
    if (found == reports_.end()) {
      EXPECT_TRUE(rank.goOn);
    } else {
      const FlushReport& mine = found->second.report;
      EXPECT_EQ(mine.ended, rank.k);
      EXPECT_EQ(static_cast<int>(mine.abort), line.decimal(4));
      EXPECT_EQ(mine.isOld, (line.decimal(5) & 1) != 0);
      EXPECT_EQ(mine.stoppedAt, rank.k + 1);
      if (skips_) {
        EXPECT_EQ(mine.hasBegun, (line.decimal(5) & 2) != 0);
        EXPECT_EQ(mine.wantsToSkip, (line.decimal(5) & 4) != 0);
      }
      EXPECT_EQ(mine.ready.size(), rank.isReady ? 1u : 0u);
      EXPECT_EQ(mine.wish, rank.wishes && !mine.closing ? kSuccessor : 0);
      if (rank.close) {
        EXPECT_EQ(mine.closing, rank.close);
      }
    }
    if (rank.heeded) {
      EXPECT_EQ(rank.machine->howEnded(rank.k).code, rank.heeded->code);
      EXPECT_EQ(rank.machine->howEnded(rank.k).message, rank.heeded->message);
      rank.ended = rank.k;
      rank.heeded.reset();
    }
  }
  void decide(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    const Attempt target =
        rank.machine->isFrozen() ? rank.machine->target() : rank.machine->attempt();
    const int reporters = line.decimal(4), outcome = line.decimal(3);
    if (!rank.goOn && isGoneThroughWith(me)) {
      for (int r = 0; r < size_ && !rank.goOn; ++r) {
        if (r == me || !std::ranges::binary_search(rank.machine->missing(), r)) continue;
        if ((reporters >> r & 1) != 0) {
          hear(r, me, target);
        } else {
          ASSERT_TRUE(hasLeft(r, me)) << "rank " << r << " said nothing";
          hearThatLeft(r, me);
        }
      }
      ASSERT_TRUE(rank.goOn) << "the code does not decide";
    }
    rank.decided = closeIn(me);
    if (rank.goOn) {
      EXPECT_EQ(rank.machine->close(), rank.decided) << "where the series closes";
      int members = 0;
      for (const int r : rank.goOn->members) members |= 1 << r;
      EXPECT_EQ(members, line.decimal(5) & 15) << "who goes on";
      const int leftOut = line.decimal(5) >> 4;
      if (leftOut != 0) {
        EXPECT_EQ(rank.goOn->first.number, line.decimal(2) + 1u);
        EXPECT_EQ(maskOf(rank.goOn->first.contributors), members & ~leftOut);
      } else {
        EXPECT_LE(rank.goOn->first.number, uint64_t(line.decimal(2))) << "nobody is left out of it";
      }
      return;
    }

    // Computes the decision from all reports that the model's rank has heard.
    std::vector<const FlushReport*> reports;
    std::map<int, FlushReport> ofLeavers;
    for (int r = 0; r < size_; ++r) {
      const auto found = reports_.find({target, r});
      if ((reporters >> r & 1) != 0 && found != reports_.end()) {
        reports.push_back(&found->second.report);
      } else if (std::ranges::binary_search(rank.machine->active(), r) && left_.contains(r)) {
        FlushReport& last = ofLeavers[r] = left_[r].report;
        last.hasLeft = last.attempt != target;
        if (last.hasLeft) last.wish = 0;
        reports.push_back(&last);
      }
    }
    const Error lost{ErrorCode::kPeerLost, ""};
    const FlushDecision decision = decideFlush(reports, raises_ ? &lost : nullptr);
    EXPECT_EQ(decision.next, line.decimal(2) + 1u) << "E";
    EXPECT_EQ(decision.close, rank.decided) << "where the series closes";
    const Error* error = decision.errorOf(decision.next);
    EXPECT_EQ(error != nullptr, outcome != kAgain);
    if (error && outcome != kAgain) {
      EXPECT_EQ(error->code, errorOf(static_cast<Verdict>(outcome & ~15), outcome & 15).code);
    }
  }
  // Whether the model acts on this decision. If not, it drops it for another event.
  bool isGoneThroughWith(int me) const {
    for (const Line& line : rest_) {
      if (line.decimal(0) != me || line.name == "closes" || line.name == "prepared") continue;
      return line.name == "act" || line.name == "adopt";
    }
    return false;
  }
  // Delivers a report. Sometimes the report counts as lost, and the rank asks for it. Then the
  // other rank must have decided: before that it sends its report again by itself.
  void hear(int other, int me, Attempt target) {
    Rank& rank = ranks_[size_t(me)];
    Rank& there = ranks_[size_t(other)];
    const bool hasDecided = there.isAlive && !left_.contains(other) && !there.machine->isFrozen() &&
                            there.machine->attempt() == target;
    if (hasDecided && isTurn("a report is asked for", 2)) {
      for (const Letter& question : tick(me)) {
        EXPECT_EQ(question.message.kind, Kind::kRepeat);
        if (question.to == other) ask(me, other, question.message);
      }
      return;
    }
    const auto found = reports_.find({target, other});
    ASSERT_NE(found, reports_.end());
    deliver(other, me, found->second);
  }
  void adopt(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    const auto verdict = static_cast<Verdict>(line.decimal(2));
    ++rank.k;
    if (verdict == kOk && rank.begun != rank.k) {
      if (rank.machine->ended() < rank.k) take(me, machine(me).skipped());
      expectSkipped(rank, line.decimal(3));
      rank.ended = rank.k;
    } else if (verdict == kOk) {
      EXPECT_EQ(rank.machine->toTake(), rank.k);
      EXPECT_LT(rank.machine->ended(), rank.k);
      rank.ended = rank.k;
      machine(me);
      take(me, rank.machine->caughtUp());
    } else {
      expectEnded(rank, verdict, line.decimal(3));
    }
  }
  void act(const Line& line, int me) {
    Rank& rank = ranks_[size_t(me)];
    ASSERT_TRUE(rank.goOn);
    const auto verdict = static_cast<Verdict>(line.decimal(2));
    if (verdict != kAgain) {
      ++rank.k;
      expectEnded(rank, verdict, line.decimal(3));
    }
    EXPECT_EQ(rank.machine->ended(), rank.k);
    EXPECT_EQ(rank.goOn->attempt, rank.machine->attempt());
    EXPECT_FALSE(rank.machine->isFrozen());
    rank.ended = rank.k;
    rank.goOn.reset();
    if (rank.decided) {
      rank.close = rank.decided;
      rank.wishes = false;
    }
  }
  static void expectEnded(Rank& rank, Verdict verdict, int by) {
    EXPECT_GE(rank.machine->ended(), rank.k);
    const Error error = rank.machine->howEnded(rank.k), expected = errorOf(verdict, by);
    EXPECT_EQ(error.code, expected.code);
    if (verdict == kAbort) {
      EXPECT_EQ(error.message, expected.message) << "whose abort";
    }
    rank.ended = rank.k;
  }

  static Attempt attemptIn(const Line& line) {
    return {static_cast<uint32_t>(line.decimal(2)), static_cast<uint32_t>(line.decimal(3))};
  }
  static Error errorOf(Verdict verdict, int rank) {
    if (verdict == kTimeout) return {ErrorCode::kTimeout, ""};
    if (verdict == kAbort) return {ErrorCode::kAborted, std::to_string(rank)};
    return {ErrorCode::kPeerLost, ""};
  }

  const int size_;
  const bool raises_;
  const bool skips_;  // the model has wishes to skip, and its reports have `begun`
  const bool moves_;  // the model has the end of the series
  std::vector<Rank> ranks_;
  std::span<const Line> rest_;
  static inline int turns_ = 0;
  std::map<int, FlushMessage> left_;
  std::map<std::pair<Attempt, int>, FlushMessage> reports_;
};

const FlushReplay::Step FlushReplay::kSteps[] = {
    {"made", &FlushReplay::made},
    {"begin", &FlushReplay::begin},
    {"commit-small", &FlushReplay::commit},
    {"commit-large", &FlushReplay::commit},
    {"commit-done", &FlushReplay::commitDone},
    {"copy-out", &FlushReplay::copyOut},
    {"gone", &FlushReplay::gone},
    {"start-round", &FlushReplay::startRound},
    {"miss-leaver", &FlushReplay::missLeaver},
    {"new-view", &FlushReplay::newView},
    {"join", &FlushReplay::join},
    {"abort", &FlushReplay::abort},
    {"wish", &FlushReplay::wish},
    {"skipped", &FlushReplay::skipped},
    {"heed-leaver", &FlushReplay::heedLeaver},
    {"report", &FlushReplay::report},
    {"decide", &FlushReplay::decide},
    {"adopt", &FlushReplay::adopt},
    {"act", &FlushReplay::act},
    {"crash", &FlushReplay::crash},
    {"evicted", &FlushReplay::crash},
    {"prepared", &FlushReplay::prepared},
    {"wish-to-move", &FlushReplay::wishToMove},
    {"closes", &FlushReplay::nothing},  // part of `decide`
    {"moved", &FlushReplay::moved},
    // Steps between the callers, in their windows. They decide nothing.
    {"see-begun", &FlushReplay::nothing},
    {"all-begun", &FlushReplay::nothing},
    {"fetch", &FlushReplay::nothing},
    {"publish-ready", &FlushReplay::nothing},
    {"see-ready", &FlushReplay::nothing},
    {"all-ready", &FlushReplay::nothing},
    {"publish-done", &FlushReplay::nothing},
    {"see-done", &FlushReplay::nothing},
    {"leave", &FlushReplay::nothing},
};

// ---- traces

// Counts the steps, so that the test can check that each was replayed.
class Traces {
 public:
  explicit Traces(std::istream& in) {
    std::string header;
    std::vector<std::string> lines;
    for (std::string text; std::getline(in, text) && !::testing::Test::HasFailure();) {
      if (text.starts_with("# ")) {
        play(header, std::exchange(lines, {}));
        if (text != "# again") header = text;
      } else {
        lines.push_back(text);
      }
    }
    play(header, lines);
  }

  std::map<std::string, int> count;  // by the model's name, and by "model step"

 private:
  void play(const std::string& header, const std::vector<std::string>& lines) {
    if (header.empty() || ::testing::Test::HasFailure()) return;
    const std::string model = Line(header).fields.at(0);
    const int ranks = says(header, "-DN=4") ? 4 : 3;
    ++count[model];
    if (model == "agreement") {
      playSteps(ViewReplay(ranks), model, header, lines);
    } else if (model == "flush") {
      playSteps(FlushReplay(ranks, header), model, header, lines);
    } else {
      FAIL() << "a trace of an unknown model: " << header;
    }
  }

  template <typename Replay>
  void playSteps(Replay&& replay, const std::string& model, const std::string& header,
                 const std::vector<std::string>& texts) {
    const std::vector<Line> lines(texts.begin(), texts.end());
    for (size_t i = 0; i < lines.size(); ++i) {
      const Line& line = lines[i];
      const auto step =
          std::ranges::find(Replay::kSteps, line.name, [](const auto& one) { return one.name; });
      ASSERT_NE(step, std::end(Replay::kSteps)) << "no such step: " << texts[i];
      replay.play(*step, lines, i);
      ++count[model + " " + line.name];
      if (!::testing::Test::HasFailure()) continue;
      std::string all;
      for (size_t j = 0; j <= i; ++j) all += texts[j] + "\n";
      FAIL() << header << "\n" << all << "^ here they differ";
    }
  }
};

TEST(Replay, TheCodeDoesWhatTheModelsDo) {
  const char* named = std::getenv("MOONCAKE_TEST_TRACES");
  const auto slice = std::filesystem::path(__FILE__).parent_path() / "model_traces.txt";
  std::ifstream in(named ? std::filesystem::path(named) : slice);
  ASSERT_TRUE(in) << "no traces";
  Traces traces(in);
  if (HasFailure()) return;
  EXPECT_GE(traces.count["agreement"], 18);
  EXPECT_GE(traces.count["flush"], 28);
  for (const auto& step : ViewReplay::kSteps)
    EXPECT_GT(traces.count[std::string("agreement ") + step.name], 0) << step.name;
  for (const auto& step : FlushReplay::kSteps)
    EXPECT_GT(traces.count[std::string("flush ") + step.name], 0) << step.name;
  for (const auto& [way, times] : FlushReplay::ways) EXPECT_GT(times, 0) << way;
}

}  // namespace
}  // namespace mooncake
