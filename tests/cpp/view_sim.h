#pragma once

#include <chrono>
#include <cstdint>
#include <gtest/gtest.h>
#include <iostream>
#include <memory>
#include <optional>
#include <queue>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "membership/view_agreement.h"

namespace mooncake {

// Many ViewAgreements in one process, with simulated hosts, network and failure detectors. Time is
// a number, so a schedule of many seconds takes less than a millisecond. All random choices come
// from one seed. After every step the invariants are checked: see failures().
class ViewSim {
 public:
  using Time = std::chrono::microseconds;  // since the start
  using Timing = ViewAgreement::Timing;

  static constexpr Time kFailureTimeout{1'000'000};
  static constexpr Timing kTiming{.grace = std::chrono::milliseconds(20),
                                  .resend = std::chrono::milliseconds(50)};

  struct Network {
    Time minDelay{100};
    Time maxDelay{1000};
    Time slowDelay{0};  // largest delay of one message in ten; 0: no message is slow
    double loss = 0;
    double duplication = 0;
    bool garbles = false;  // bits flip, now and then
    // How long a rank gathers news before it sends its report.
    Time gathers{0};
    Time witnessDelay{2000};   // longest time from an exit until the ranks of its host know
    double lateWitness = 0.1;  // the chance that it takes much longer
  };

  // The ranks of a host are consecutive; links between them never break.
  ViewSim(int ranks, int ranksPerHost, Network network, uint64_t seed)
      : network_(network), random_(seed), ranksPerHost_(ranksPerHost) {
    const View first{1, JobRanks::firstRanks(ranks)};
    for (int r = 0; r < ranks; ++r) {
      ranks_.push_back({.machine = std::make_unique<ViewAgreement>(r, first, kTiming)});
      ranks_[r].published = keep(ranks_[r].machine->report());
      ranks_[r].linksDown.resize(ranks);
      ranks_[r].deafSince.resize(ranks, kNever);
    }
  }

  int size() const { return static_cast<int>(ranks_.size()); }
  bool sameHost(int a, int b) const { return a / ranksPerHost_ == b / ranksPerHost_; }
  Time now() const { return now_; }
  std::mt19937_64& random() { return random_; }
  int below(int limit) { return static_cast<int>(random_() % static_cast<uint64_t>(limit)); }
  bool chance(double p) { return static_cast<double>(random_() >> 11) * 0x1.0p-53 < p; }
  Time between(Time low, Time high) { return low + Time(below(int((high - low).count()) + 1)); }

  // ---- faults, each at a given time

  // With `afterSends`, the rank dies while it sends its next reports: that many are still sent.
  void killAt(Time when, int rank, int afterSends = 0) {
    push({.when = when, .kind = Kind::kKill, .to = rank, .number = afterSends});
  }
  void leaveAt(Time when, int rank) { push({.when = when, .kind = Kind::kLeave, .to = rank}); }
  // Cuts the link from `from` to `to`, in this direction only.
  void cutAt(Time when, int from, int to, bool down = true) {
    if (!sameHost(from, to))
      push({.when = when, .kind = Kind::kLink, .to = to, .from = from, .number = down});
  }
  void partitionAt(Time when, const JobRanks& side, bool down = true) {
    for (int a = 0; a < size(); ++a) {
      for (int b = 0; b < size(); ++b) {
        if (side.contains(a) != side.contains(b)) cutAt(when, a, b, down);
      }
    }
  }
  // Like SIGSTOP, and SIGCONT at `until`.
  void stopAt(Time when, int rank, Time until) {
    push({.when = when, .kind = Kind::kStop, .to = rank, .number = int(until.count())});
  }
  void suspectAt(Time when, int rank, int other) {
    push({.when = when, .kind = Kind::kSuspect, .to = rank, .from = other});
  }
  // A launcher tells ranks of exits. It knows of goodbyes, but not of reports.
  bool launcherTestifies = false;
  bool traces = false;  // writes each step to stderr

  // Runs until no event is left. False: the events never ended.
  bool run() {
    constexpr Time kForever{600'000'000};
    const uint64_t tooManySteps = 1'000'000 + 20 * uint64_t(size()) * uint64_t(size());
    while (!queue_.empty() && failures_.empty()) {
      const Event event = queue_.top();
      queue_.pop();
      if (event.when > kForever || steps_ > tooManySteps) return false;
      now_ = event.when;
      ++steps_;
      handle(event);
    }
    return true;
  }

  // ---- results

  enum class Life { kRunning, kOver, kLeft, kDead };

  const ViewAgreement& machine(int rank) const { return *ranks_[rank].machine; }
  Life life(int rank) const { return ranks_[rank].life; }
  bool inMinority(int rank) const { return ranks_[rank].minority; }
  const std::optional<ViewActions::Eviction>& evicted(int rank) const {
    return ranks_[rank].evicted;
  }
  JobRanks running() const {
    JobRanks set;
    for (int r = 0; r < size(); ++r) {
      if (life(r) == Life::kRunning) set.add(r);
    }
    return set;
  }
  const std::vector<Accusation>& accused(int rank) const { return ranks_[rank].accused; }
  const std::vector<std::string>& failures() const { return failures_; }
  uint64_t messages() const { return messages_; }
  uint64_t bytes() const { return bytes_; }
  Time lastCommit() const { return lastCommit_; }

  // Checks that all running ranks have committed the same view, with exactly these ranks.
  void expectAgreement() {
    const JobRanks all = running();
    all.forEach([&](int r) {
      if (machine(r).nextTick()) fail("rank " + std::to_string(r) + " is still undecided");
      if (machine(r).view().active != all)
        fail("rank " + std::to_string(r) + " ended in view " + text(machine(r).view().active) +
             " while " + text(all) + " go on");
    });
  }

  static std::string text(const JobRanks& set) {
    std::string out;
    set.forEach([&](int rank) { out += (out.empty() ? "{" : ",") + std::to_string(rank); });
    return out.empty() ? "{}" : out + "}";
  }

 private:
  static constexpr Time kNever{-1};

  enum class Kind : uint8_t {
    kReport,
    kGoodbye,
    kWitness,  // `to` learns that `from` has exited, and gets its last report
    kTestify,  // the same, without the report
    kScan,     // `to` looks for silent ranks
    kTick,
    kSend,
    kKill,
    kLeave,
    kLink,
    kStop,
    kSuspect,
  };
  struct Event {
    Time when;
    Kind kind;
    int to;
    int from = 0;
    int number = 0;  // of the report, or another argument of the kind
    uint64_t order = 0;
    bool operator<(const Event& other) const {
      return when != other.when ? when > other.when : order > other.order;
    }
  };
  struct Rank {
    std::unique_ptr<ViewAgreement> machine;
    Life life = Life::kRunning;
    bool minority = false;
    std::optional<ViewActions::Eviction> evicted;
    int sendsLeft = -1;  // it dies after so many sends; -1: it does not
    Time stoppedUntil{0};
    Time tickAt = kNever;
    JobRanks unsent;              // ranks to which it still has to send its report
    int published = 0;            // its last report, which the ranks of its host can read
    std::vector<bool> linksDown;  // [from]
    std::vector<Time> deafSince;  // [from]
    std::vector<Accusation> accused;
  };
  struct Commit {
    JobRanks out;
    JobRanks by;
  };

  void push(Event event) {
    event.order = ++order_;
    queue_.push(event);
  }
  int keep(const ViewReport& report) {
    reports_.push_back(report);
    return static_cast<int>(reports_.size()) - 1;
  }
  void fail(const std::string& what) {
    failures_.push_back("at " + std::to_string(now_.count()) + " us: " + what);
  }
  Clock::time_point clock() const { return Clock::time_point(now_); }
  bool isAlive(int rank) const { return life(rank) == Life::kRunning || life(rank) == Life::kOver; }

  void handle(const Event& event) {
    if (traces) trace(event);
    Rank& rank = ranks_[event.to];
    if (event.kind == Kind::kLink) {
      rank.linksDown[event.from] = event.number != 0;
      return hear(event.to, event.from);
    }
    if (event.kind == Kind::kKill) {
      if (!isAlive(event.to)) return;
      if (event.number == 0) return die(event.to, Life::kDead);
      rank.sendsLeft = event.number;
      return;
    }
    if (life(event.to) != Life::kRunning) return;
    if (now_ < rank.stoppedUntil) {
      Event later = event;
      later.when = rank.stoppedUntil;
      return push(later);
    }
    ViewAgreement& machine = *rank.machine;
    switch (event.kind) {
      case Kind::kReport:
      case Kind::kGoodbye:
        if (rank.linksDown[event.from]) return;
        act(event.to, machine.received(reports_[event.number], clock()));
        if (event.kind == Kind::kGoodbye && life(event.to) == Life::kRunning)
          act(event.to, machine.left(event.from, clock()));
        return;
      case Kind::kWitness:
        act(event.to, machine.received(reports_[ranks_[event.from].published], clock()));
        if (life(event.to) != Life::kRunning) return;
        if (life(event.from) == Life::kLeft)
          return act(event.to, machine.left(event.from, clock()));
        return act(event.to, machine.exited({event.from}, LastReport::kReceived, clock()));
      case Kind::kTestify:
        return act(event.to, machine.exited({event.from}, LastReport::kUnknown, clock()));
      case Kind::kScan:
        return scan(event.to);
      case Kind::kTick:
        if (rank.tickAt == kNever || event.when < rank.tickAt) return;
        rank.tickAt = kNever;
        return act(event.to, machine.tick(clock()));
      case Kind::kSend:
        return sendReports(event.to);
      case Kind::kLeave:
        return leave(event.to, Life::kLeft);
      case Kind::kStop:
        rank.stoppedUntil = Time(event.number);
        for (int r = 0; r < size(); ++r) {
          hear(r, event.to);
          // Time in which the detector is stopped does not count.
          Time& since = rank.deafSince[r];
          if (since != kNever) since = rank.stoppedUntil;
        }
        push({.when = rank.stoppedUntil, .kind = Kind::kScan, .to = event.to});
        scanLater(event.to, rank.stoppedUntil);
        return;
      case Kind::kSuspect:
        suspicious_ = true;
        blamed_.add(event.from);
        return act(event.to, machine.suspected({event.from}, Cause::kRefused, clock()));
      case Kind::kLink:
      case Kind::kKill:
        return;
    }
  }

  using LastReport = ViewAgreement::LastReport;

  void trace(const Event& event) const {
    static constexpr const char* kNames[] = {"report", "goodbye", "witness", "testify",
                                             "scan",   "tick",    "send",    "kill",
                                             "leave",  "link",    "stop",    "suspect"};
    std::cerr << now_.count() << " us: rank " << event.to << " of "
              << text(machine(event.to).view().active) << " gets " << kNames[int(event.kind)]
              << " of " << event.from << ", " << event.number;
    if (event.kind == Kind::kReport || event.kind == Kind::kGoodbye ||
        event.kind == Kind::kWitness) {
      const ViewReport& report = event.kind == Kind::kWitness
                                     ? reports_[ranks_[event.from].published]
                                     : reports_[event.number];
      std::cerr << ": committed " << text(report.committed) << " gone " << text(report.gone)
                << " settled " << text(report.settled) << " suspected " << text(report.suspected);
    }
    std::cerr << "\n";
  }

  void scanLater(int rank, Time since) {
    push({.when = since + kFailureTimeout + between(Time(0), Time(10'000)),
          .kind = Kind::kScan,
          .to = rank});
  }

  // Updates whether `rank` hears `from`.
  void hear(int rank, int from) {
    if (rank == from) return;
    const Rank& other = ranks_[from];
    const bool hears = !ranks_[rank].linksDown[from] && life(from) == Life::kRunning &&
                       now_ >= other.stoppedUntil && other.machine->view().active.contains(rank);
    Time& since = ranks_[rank].deafSince[from];
    if (hears) {
      since = kNever;
    } else if (since == kNever) {
      since = std::max(now_, ranks_[rank].stoppedUntil);
      if (life(rank) == Life::kRunning) scanLater(rank, since);
    }
  }

  void scan(int rank) {
    JobRanks silent;
    for (int r = 0; r < size(); ++r) {
      hear(r, rank);  // `rank` may have been continued
      const Time since = ranks_[rank].deafSince[r];
      if (r != rank && since != kNever && now_ - since >= kFailureTimeout) silent.add(r);
    }
    silent = silent & machine(rank).view().active;
    if (silent.empty()) return;
    suspicious_ = suspicious_ || !silent.isSubsetOf(machine(rank).report().gone);
    blamed_ |= silent;
    act(rank, ranks_[rank].machine->suspected(silent, Cause::kSilent, clock()));
  }

  void act(int rank, const ViewActions& actions) {
    Rank& self = ranks_[rank];
    self.accused.insert(self.accused.end(), actions.accused.begin(), actions.accused.end());
    if (actions.commit) committed(rank, *actions.commit);
    self.unsent |= actions.sendTo;
    if (!actions.sendTo.empty()) {
      if (network_.gathers == Time(0)) {
        sendReports(rank);
      } else {
        push({.when = now_ + network_.gathers, .kind = Kind::kSend, .to = rank});
      }
    }
    if (life(rank) != Life::kRunning) return;
    if (actions.minority || actions.evicted) {
      self.minority = actions.minority;
      self.evicted = actions.evicted;
      if (!suspicious_) fail("rank " + std::to_string(rank) + " is over though nobody suspects");
      if (actions.evicted) checkEviction(rank, *actions.evicted);
      return leave(rank, Life::kOver);
    }
    const auto next = self.machine->nextTick();
    if (!next) return;
    const Time when =
        std::max(now_, std::chrono::duration_cast<Time>(next->time_since_epoch()) + Time(1));
    if (self.tickAt != kNever && self.tickAt <= when) return;
    self.tickAt = when;
    push({.when = when, .kind = Kind::kTick, .to = rank});
  }

  void sendReports(int rank) {
    Rank& self = ranks_[rank];
    if (self.unsent.empty()) return;
    self.published = keep(self.machine->report());
    // A rank that takes out a living rank can be taken out in return.
    if (!self.machine->report().suspected.empty()) blamed_.add(rank);
    const size_t bytes = encodeViewReport(self.machine->report()).size();
    bool alive = true;
    (std::exchange(self.unsent, {}) - self.machine->report().gone).forEach([&](int to) {
      if (!alive) return;
      send(Kind::kReport, rank, to, self.published);
      bytes_ += bytes;
      alive = self.sendsLeft < 0 || --self.sendsLeft > 0;
    });
    if (!alive) die(rank, Life::kDead);
  }

  void send(Kind kind, int from, int to, int report) {
    ++messages_;
    const bool isReliable = kind == Kind::kGoodbye || sameHost(from, to);
    if (!isReliable && chance(network_.loss)) return;
    if (network_.garbles && !isReliable && chance(0.02)) {
      // A garbled report mostly does not decode. If it does, the driver's checksum rejects it.
      Bytes bytes = encodeViewReport(reports_[report]);
      bytes[random_() % bytes.size()] ^= std::byte(1 << below(8));
      if (auto decoded = decodeViewReport(bytes, size());
          !decoded.ok() || *decoded != reports_[report])
        return;
    }
    do {
      const bool slow = network_.slowDelay > Time(0) && chance(0.1);
      const Time delay = between(network_.minDelay, slow ? network_.slowDelay : network_.maxDelay);
      push({.when = now_ + delay, .kind = kind, .to = to, .from = from, .number = report});
    } while (!isReliable && chance(network_.duplication));
  }

  void leave(int rank, Life how) {
    Rank& self = ranks_[rank];
    self.published = keep(self.machine->report());
    for (int r = 0; r < size(); ++r) {
      if (r == rank) continue;
      send(Kind::kGoodbye, rank, r, self.published);
      if (self.sendsLeft >= 0 && --self.sendsLeft <= 0) {
        how = Life::kDead;
        break;
      }
    }
    die(rank, how);
  }

  void die(int rank, Life how) {
    ranks_[rank].life = how;
    for (int r = 0; r < size(); ++r) {
      hear(r, rank);
      if (how == Life::kOver || r == rank || life(r) != Life::kRunning) continue;
      if (sameHost(r, rank)) {
        const bool late = chance(network_.lateWitness);
        const Time delay = between(Time(0), late ? Time(300'000) : network_.witnessDelay);
        push({.when = now_ + delay, .kind = Kind::kWitness, .to = r, .from = rank});
      } else if (how == Life::kDead && launcherTestifies && !ranks_[r].linksDown[rank]) {
        const Time delay = between(Time(1000), Time(50'000));
        push({.when = now_ + delay, .kind = Kind::kTestify, .to = r, .from = rank});
      }
    }
  }

  void committed(int rank, const View& view) {
    lastCommit_ = now_;
    const JobRanks out = JobRanks::firstRanks(size()) - view.active;
    const std::string name = "rank " + std::to_string(rank) + " commits " + text(view.active);
    if (view.epoch != 1u + out.count()) fail(name + " with a wrong epoch");
    if (!view.active.contains(rank)) fail(name + " without itself");
    out.forEach([&](int r) {
      if (life(r) == Life::kRunning && !blamed_.contains(r))
        fail(name + " without rank " + std::to_string(r) + ", which nobody had a reason to accuse");
    });
    Commit* known = nullptr;
    for (Commit& other : commits_) {
      if (other.out == out) known = &other;
      bool binds = false;
      other.by.forEach([&](int r) { binds = binds || life(r) != Life::kDead; });
      if (binds && !other.out.isSubsetOf(out) && !out.isSubsetOf(other.out))
        fail(name + " against " + text(JobRanks::firstRanks(size()) - other.out) + " of " +
             text(other.by));
    }
    if (!known) known = &commits_.emplace_back(Commit{out, {}});
    known->by.add(rank);
    out.forEach([&](int r) { hear(r, rank); });
  }

  void checkEviction(int rank, const ViewActions::Eviction& eviction) {
    for (const Commit& commit : commits_) {
      if (commit.out.contains(rank) && 1u + commit.out.count() == eviction.epoch) return;
    }
    fail("rank " + std::to_string(rank) + " is evicted by a view that nobody has committed");
  }

  const Network network_;
  std::mt19937_64 random_;
  const int ranksPerHost_;
  std::vector<Rank> ranks_;
  std::priority_queue<Event> queue_;
  std::vector<ViewReport> reports_;
  std::vector<Commit> commits_;  // distinct ones
  JobRanks blamed_;              // ranks that another one had a reason to accuse
  bool suspicious_ = false;      // a rank was suspected that was not known to be gone
  Time now_{0};
  Time lastCommit_{0};
  uint64_t order_ = 0;
  uint64_t messages_ = 0;
  uint64_t bytes_ = 0;
  uint64_t steps_ = 0;
  std::vector<std::string> failures_;
};

}  // namespace mooncake
