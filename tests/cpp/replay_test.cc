// Random traces of the models in docs/models, replayed against the code: after every step both must
// have done the same. The slice beside this file is replayed by default; docs/models/run.sh
// --replay makes others (spin is needed for that) and names them in MOONCAKE_TEST_TRACES.
//
// Traces begin with a line "# model flags": what spin was given, so that they can be made again; or
// with "# again": by the same. Then a line for each step: its name, its rank, what the model says
// of it. The tables kSteps below say what is called for each; docs/membership.md, section 8, has
// them in words.
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
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "membership/flush.h"
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

// ---- agreement.pml: ViewAgreement decides

RankSet setOf(int mask) {
  RankSet set;
  for (int r = 0; mask >> r != 0; ++r) {
    if ((mask >> r & 1) != 0) set.add(r);
  }
  return set;
}

int maskOf(const RankSet& set) {
  int mask = 0;
  set.forEach([&](int rank) { mask |= 1 << rank; });
  return mask;
}

// As the model writes a report.
int wordOf(const ViewReport& report) {
  return maskOf(report.committed) | maskOf(report.gone) << 4 | maskOf(report.resolution) << 8 |
         maskOf(report.suspected) << 12;
}

class ViewReplay {
 public:
  explicit ViewReplay(int ranks) : all_(RankSet::firstRanks(ranks)) {
    for (int r = 0; r < ranks; ++r) ranks_.emplace_back(r, View{1, all_});
  }

  struct Step {
    const char* name;
    void (ViewReplay::*play)(const Line&, int me, int other);
  };
  static const Step kSteps[];

  void play(const Step& step, const Line& line) {
    (this->*step.play)(line, line.decimal(0), line.decimal(1));
  }

 private:
  // Two clocks in one: nobody's grace is over before `give-up-on` says so.
  static constexpr ViewAgreement::Timing kTiming{.grace = std::chrono::hours(1),
                                                 .resend = std::chrono::milliseconds(1)};
  struct Rank {
    Rank(int self, const View& first) : machine(self, first, kTiming) {}

    ViewAgreement machine;
    Clock::time_point now{};
    std::map<int, Bytes> told;  // all that it ever reported, by the model's word for it
    RankSet committed, out;     // as of its last call
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
  // What `me` is to receive next, though something older is still under way to it.
  void overtake(const Line& line, int, int other) {
    EXPECT_EQ(wordOf(ranks_[other].machine.report()), line.hex(2));
  }
  void nothing(const Line&, int, int) {}

  // What the code did; and, at the end of the line, what the model did.
  void expectSame(const Line& line, int me, const ViewActions& actions) {
    Rank& rank = ranks_[me];
    const int told = line.hex(4), how = line.decimal(6);
    const RankSet sendTo = setOf(line.hex(3)), committed = setOf(line.hex(5));
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
      RankSet accused;
      for (const Accusation& one : actions.accused) accused.add(one.rank);
      EXPECT_EQ(maskOf(accused), maskOf(report.out() - rank.out)) << "whom it accuses";
      rank.out = report.out();
    }
    rank.told.emplace(told, encodeViewReport(report));
  }

  const RankSet all_;
  std::vector<Rank> ranks_;
};

// A step may be given to several calls or to none; a call may take several steps. What a step of
// agreement.pml decides is told by the line of the call that it is part of (`commit`,
// `evicted`...).
const ViewReplay::Step ViewReplay::kSteps[] = {
    {"received", &ViewReplay::received}, {"exited", &ViewReplay::exited},
    {"left", &ViewReplay::left},         {"suspected", &ViewReplay::suspected},
    {"refused", &ViewReplay::refused},   {"give-up-on", &ViewReplay::giveUpOn},
    {"tick", &ViewReplay::tick},         {"send", &ViewReplay::send},
    {"overtake", &ViewReplay::overtake}, {"lose", &ViewReplay::nothing},
    {"crash", &ViewReplay::nothing},     {"leave", &ViewReplay::nothing},
};

// ---- flush.pml: decideFlush decides

// A rank's report is made as FlushMachine::stopped makes it, what is decided is done as in
// FlushMachine::act, only an operation at a time, as in the model.
class FlushReplay {
 public:
  FlushReplay(int ranks, bool raises) : ranks_(ranks), raises_(raises) {}

  struct Step {
    const char* name;
    void (FlushReplay::*play)(const Line&, int me);
  };
  static const Step kSteps[];

  void play(const Step& step, const Line& line) {
    const int me = line.decimal(0);
    if (step.play != &FlushReplay::nothing) {
      EXPECT_EQ(ranks_[me].ended, line.decimal(1)) << "how many operations it has ended";
    }
    (this->*step.play)(line, me);
  }

 private:
  using AbortReason = FlushReport::AbortReason;
  // As the model writes how an operation ended.
  enum Verdict { kAgain = 0, kOk = 16, kTimeout = 32, kLost = 48, kAbort = 80 };

  struct Rank {
    uint64_t ended = 0;
    Attempt attempt, target;
    std::vector<FailedOperation> failed;
    AbortReason abort = AbortReason::kNone;
    uint64_t abortNumber = 0;
    Error why;
    std::optional<FlushDecision> decision;
  };

  void nothing(const Line&, int) {}
  void commit(const Line& line, int me) {
    const auto verdict = static_cast<Verdict>(line.decimal(2));
    end(ranks_[me], verdict == kOk ? Error() : errorOf(verdict, 0));
  }
  void gone(const Line&, int me) {
    const Rank& rank = ranks_[me];
    const Attempt reportedFor = std::max(rank.target, rank.attempt);
    const FlushReport last{.from = me,
                           .attempt = reportedFor,
                           .ended = rank.ended,
                           .isOld = rank.attempt.losses < reportedFor.losses,
                           .abort = AbortReason::kNone,
                           .why = Error(),
                           .failed = rank.failed};
    left_[me] = carried(last);
  }
  void freeze(const Line& line, int me) {
    Rank& rank = ranks_[me];
    const Attempt target = attemptIn(line);
    EXPECT_GT(target, std::max(rank.target, rank.attempt));
    rank.target = target;
    rank.decision.reset();
  }
  void abort(const Line& line, int me) {
    Rank& rank = ranks_[me];
    rank.abort = static_cast<AbortReason>(line.decimal(2));
    rank.abortNumber = rank.ended + 1;
    rank.why = errorOf(rank.abort == AbortReason::kTimeout ? kTimeout : kAbort, me);
  }
  void report(const Line& line, int me) {
    const Rank& rank = ranks_[me];
    EXPECT_EQ(rank.target, attemptIn(line));
    const bool aborts = rank.abortNumber == rank.ended + 1;
    const FlushReport mine{.from = me,
                           .attempt = rank.target,
                           .ended = rank.ended,
                           .isOld = rank.attempt.losses < rank.target.losses,
                           .abort = aborts ? rank.abort : AbortReason::kNone,
                           .why = aborts ? rank.why : Error(),
                           .failed = rank.failed};
    EXPECT_EQ(static_cast<int>(mine.abort), line.decimal(4));
    EXPECT_EQ(mine.isOld, line.decimal(5) != 0);
    reports_[{rank.target, me}] = carried(mine);
  }
  void decide(const Line& line, int me) {
    Rank& rank = ranks_[me];
    std::vector<const FlushReport*> reports;
    for (int r = 0; r < static_cast<int>(ranks_.size()); ++r) {
      const bool reported = (line.decimal(4) >> r & 1) != 0;
      if (reported) {
        const auto found = reports_.find({rank.target, r});
        ASSERT_NE(found, reports_.end());
        reports.push_back(&found->second);
      } else if (left_.contains(r)) {
        reports.push_back(&left_[r]);
      }
    }
    const Error lost = errorOf(kLost, 0);
    const FlushDecision decision = decideFlush(reports, raises_ ? &lost : nullptr);
    EXPECT_EQ(decision.next, line.decimal(2) + 1u) << "E";
    const int outcome = line.decimal(3);
    expectSame(decision.errorOf(decision.next), outcome & ~15, outcome & 15);
    rank.decision = decision;
  }
  void adopt(const Line& line, int me) {
    Rank& rank = ranks_[me];
    ASSERT_TRUE(rank.decision);
    ASSERT_LT(rank.ended + 1, rank.decision->next);
    const Error* error = rank.decision->errorOf(rank.ended + 1);
    const int verdict = line.decimal(2);
    expectSame(error, verdict == kOk ? 0 : verdict, verdict == kOk ? 0 : line.decimal(3));
    const bool needsData = rank.decision->endedBy({.ended = rank.ended}) == rank.ended;
    EXPECT_EQ(needsData, verdict == kOk);
    end(rank, error ? *error : Error());
  }
  void act(const Line& line, int me) {
    Rank& rank = ranks_[me];
    ASSERT_TRUE(rank.decision);
    EXPECT_EQ(rank.ended + 1, rank.decision->next);
    const Error* error = rank.decision->errorOf(rank.ended + 1);
    expectSame(error, line.decimal(2), line.decimal(3));
    EXPECT_EQ(rank.decision->endedBy({.ended = rank.ended}), rank.ended + (error ? 1 : 0));
    if (error) end(rank, *error);
    rank.attempt = rank.target;
    rank.abort = AbortReason::kNone;
    rank.abortNumber = 0;
    rank.decision.reset();
  }

  FlushReport carried(const FlushReport& report) const {
    const Bytes sent = encodeFlushReport(report);
    ByteReader in(sent);
    auto arrived = decodeFlushReport(in, static_cast<int>(ranks_.size()));
    EXPECT_TRUE(arrived.ok()) << arrived.error().message;
    return arrived.ok() ? std::move(*arrived) : FlushReport();
  }
  static Attempt attemptIn(const Line& line) {
    return {static_cast<uint32_t>(line.decimal(2)), static_cast<uint32_t>(line.decimal(3))};
  }
  static Error errorOf(Verdict verdict, int rank) {
    if (verdict == kTimeout) return {ErrorCode::kTimeout, ""};
    if (verdict == kAbort) return {ErrorCode::kAborted, std::to_string(rank)};
    return {ErrorCode::kPeerLost, ""};
  }
  static void expectSame(const Error* error, int verdict, int rank) {
    EXPECT_EQ(error != nullptr, verdict != kAgain);
    if (!error || verdict == kAgain) return;
    const Error expected = errorOf(static_cast<Verdict>(verdict), rank);
    EXPECT_EQ(error->code, expected.code);
    EXPECT_EQ(error->message, expected.message) << "whose abort";
  }
  static void end(Rank& rank, const Error& error) {
    ++rank.ended;
    if (error.code != ErrorCode::kOk) rank.failed.push_back({rank.ended, error});
  }

  std::vector<Rank> ranks_;
  const bool raises_;
  std::map<int, FlushReport> left_;
  std::map<std::pair<Attempt, int>, FlushReport> reports_;
};

const FlushReplay::Step FlushReplay::kSteps[] = {
    {"commit-small", &FlushReplay::commit},
    {"commit-large", &FlushReplay::commit},
    {"commit-done", &FlushReplay::commit},
    {"gone", &FlushReplay::gone},
    {"start-round", &FlushReplay::freeze},
    {"miss-leaver", &FlushReplay::freeze},
    {"new-view", &FlushReplay::freeze},
    {"join", &FlushReplay::freeze},
    {"abort", &FlushReplay::abort},
    {"report", &FlushReplay::report},
    {"decide", &FlushReplay::decide},
    {"adopt", &FlushReplay::adopt},
    {"act", &FlushReplay::act},
    // Between the callers: what they read and write is in their windows, and nothing is decided.
    {"begin", &FlushReplay::nothing},
    {"see-begun", &FlushReplay::nothing},
    {"all-begun", &FlushReplay::nothing},
    {"fetch", &FlushReplay::nothing},
    {"publish-ready", &FlushReplay::nothing},
    {"see-ready", &FlushReplay::nothing},
    {"all-ready", &FlushReplay::nothing},
    {"publish-done", &FlushReplay::nothing},
    {"see-done", &FlushReplay::nothing},
    {"copy-out", &FlushReplay::nothing},
    {"leave", &FlushReplay::nothing},
    {"evicted", &FlushReplay::nothing},
    {"crash", &FlushReplay::nothing},
};

// ---- traces

bool says(const std::string& header, const std::string& flag) {
  return (header + " ").find(" " + flag + " ") != std::string::npos;
}

// Counts the steps, to tell whether each was ever replayed.
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

  std::map<std::string, int> count;  // of a model's name, and of "model step"

 private:
  void play(const std::string& header, const std::vector<std::string>& lines) {
    if (header.empty() || ::testing::Test::HasFailure()) return;
    const std::string model = Line(header).fields.at(0);
    const int ranks = says(header, "-DN=4") ? 4 : 3;
    ++count[model];
    if (model == "agreement") {
      playSteps(ViewReplay(ranks), model, header, lines);
    } else if (model == "flush") {
      playSteps(FlushReplay(ranks, says(header, "-DRAISE")), model, header, lines);
    } else {
      FAIL() << "a trace of an unknown model: " << header;
    }
  }

  template <typename Replay>
  void playSteps(Replay replay, const std::string& model, const std::string& header,
                 const std::vector<std::string>& lines) {
    for (size_t i = 0; i < lines.size(); ++i) {
      const Line line(lines[i]);
      const auto step =
          std::ranges::find(Replay::kSteps, line.name, [](const auto& one) { return one.name; });
      ASSERT_NE(step, std::end(Replay::kSteps)) << "no such step: " << lines[i];
      replay.play(*step, line);
      ++count[model + " " + line.name];
      if (!::testing::Test::HasFailure()) continue;
      std::string all;
      for (size_t j = 0; j <= i; ++j) all += lines[j] + "\n";
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
}

}  // namespace
}  // namespace mooncake
