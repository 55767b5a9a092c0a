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

#include "membership/term.h"
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

  // The ranks of a host are consecutive; links between them never break. `admits`: candidates may
  // ask for ranks. They are processes with the numbers from size() on, in the order of joinAt().
  ViewSim(int ranks, int ranksPerHost, Network network, uint64_t seed, bool admits = false)
      : network_(network), random_(seed), size_(ranks), admits_(admits) {
    Term first;
    for (int r = 0; r < ranks; ++r) first.holders.push_back(Holder{idOf(r)});
    for (int r = 0; r < ranks; ++r) {
      ranks_.push_back({.seat = r, .host = r / ranksPerHost});
      ranks_[r].known = JobRanks::firstRanks(ranks);
      ranks_[r].view = JobRanks::firstRanks(ranks);
      makeMachine(r, first);
    }
    for (Rank& rank : ranks_) {
      rank.linksDown.resize(ranks);
      rank.deafSince.resize(ranks, kNever);
    }
  }

  // Number of ranks of the job.
  int size() const { return size_; }
  // Number of processes: the first ranks, and the candidates.
  int processes() const { return static_cast<int>(ranks_.size()); }
  bool sameHost(int a, int b) const { return ranks_[a].host == ranks_[b].host; }
  Time now() const { return now_; }
  std::mt19937_64& random() { return random_; }
  int below(int limit) { return static_cast<int>(random_() % static_cast<uint64_t>(limit)); }
  bool chance(double p) { return static_cast<double>(random_() >> 11) * 0x1.0p-53 < p; }
  Time between(Time low, Time high) { return low + Time(below(int((high - low).count()) + 1)); }

  // ---- faults, each at a given time

  // With `afterSends`, the rank dies while it sends its next reports: that many are still sent.
  // A new process asks for this rank, on the host of its first holder or on a host of its own.
  // Returns its number. Call it before partitionAt().
  int joinAt(Time when, int seat, bool onSameHost) {
    const int process = processes();
    const int host = onSameHost ? ranks_[seat].host : 1'000'000 + process;
    ranks_.push_back({.life = Life::kWaiting, .seat = seat, .host = host});
    for (Rank& rank : ranks_) {
      rank.linksDown.resize(ranks_.size());
      rank.deafSince.resize(ranks_.size(), kNever);
    }
    push({.when = when, .kind = Kind::kAsk, .to = process});
    return process;
  }
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
    for (int a = 0; a < processes(); ++a) {
      for (int b = 0; b < processes(); ++b) {
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

  enum class Life { kRunning, kOver, kLeft, kDead, kWaiting };

  const ViewAgreement& machine(int rank) const { return *ranks_[rank].machine; }
  Life life(int rank) const { return ranks_[rank].life; }
  bool inMinority(int rank) const { return ranks_[rank].minority; }
  const std::optional<ViewActions::Eviction>& evicted(int rank) const {
    return ranks_[rank].evicted;
  }
  JobRanks running() const {
    JobRanks set;
    for (int r = 0; r < processes(); ++r) {
      if (life(r) == Life::kRunning) set.add(r);
    }
    return set;
  }
  // The processes of the view of this one.
  const JobRanks& viewOf(int rank) const { return ranks_[rank].view; }
  bool hasEntered(int process) const {
    return ranks_[process].machine && !ranks_[process].machine->isCandidate();
  }
  const std::vector<Accusation>& accused(int rank) const { return ranks_[rank].accused; }
  const std::vector<std::string>& failures() const { return failures_; }
  uint64_t messages() const { return messages_; }
  uint64_t bytes() const { return bytes_; }
  Time lastCommit() const { return lastCommit_; }

  // Checks that all running ranks have committed the same view, with exactly these ranks. A
  // candidate that is in no view may be left over.
  void expectAgreement() {
    JobRanks all = running();
    for (int p = size(); p < processes(); ++p) {
      if (!hasEntered(p) && !(ranks_[p].machine && ranks_[p].machine->takesPart()))
        all -= JobRanks{p};
    }
    all.forEach([&](int r) {
      if (machine(r).nextTick()) fail("rank " + std::to_string(r) + " is still undecided");
      if (viewOf(r) != all)
        fail("rank " + std::to_string(r) + " ended in view " + text(viewOf(r)) + " while " +
             text(all) + " go on");
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
    kAsk,        // `to`, a candidate, asks to be let in
    kConnected,  // `to` hears that the candidate `from` has connections to all of its view
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
    int seat = 0;  // the rank that it holds or asks for
    int host = 0;
    JobRanks known;    // processes that have been in its roster or its joins
    JobRanks view;     // processes of its view
    JobRanks joined;   // candidates with which terms were closed, as far as it has followed
    int tries = 0;     // of a candidate
    TermId askedTerm;  // of the member that it asked last
    uint64_t askedEpoch = 0;
    bool minority = false;
    std::optional<ViewActions::Eviction> evicted;
    int sendsLeft = -1;  // it dies after so many sends; -1: it does not
    Time stoppedUntil{0};
    Time tickAt = kNever;
    JobRanks unsent;              // processes to which it still has to send its report
    int published = 0;            // its last report, which the ranks of its host can read
    std::vector<bool> linksDown;  // [from]
    std::vector<Time> deafSince;  // [from]
    std::vector<Accusation> accused;
  };
  struct Commit {
    JobRanks out, joined;
    uint64_t epoch;
    JobRanks by;
  };

  static EngineId idOf(int process) {
    EngineId id{};
    id[0] = std::byte(1);
    id[1] = std::byte(process >> 8);  // the order of ids is that of the processes
    id[2] = std::byte(process);
    return id;
  }
  static int processOf(const EngineId& id) { return int(id[1]) << 8 | int(id[2]); }
  std::optional<int> numberAt(int at, int process) const {
    return ranks_[at].machine->numberOf(idOf(process), ranks_[process].seat);
  }
  void makeMachine(int process, const Term& term) {
    Rank& rank = ranks_[process];
    ViewAgreement::Options options{
        .id = idOf(process), .term = term, .timing = kTiming, .admits = admits_};
    if (process >= size()) options.asksFor = rank.seat;
    rank.machine = std::make_unique<ViewAgreement>(std::move(options));
    rank.published = keep(rank.machine->report());
  }
  JobRanks processesOf(const ViewAgreement& machine, const JobRanks& numbers) const {
    JobRanks found;
    numbers.forEach([&](int number) { found.add(processOf(machine.idOf(number))); });
    return found;
  }
  // Returns whether `at` has taken this process out of its view.
  bool excludes(int at, int process) const {
    if (!ranks_[at].known.contains(process)) return false;
    const auto number = numberAt(at, process);
    return !number || ranks_[at].machine->report().committed.contains(*number);
  }

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
    if (life(event.to) == Life::kWaiting && event.kind == Kind::kAsk) {
      rank.life = Life::kRunning;
      for (int r = 0; r < processes(); ++r) hear(r, event.to);
    }
    if (life(event.to) != Life::kRunning) return;
    if (now_ < rank.stoppedUntil) {
      Event later = event;
      later.when = rank.stoppedUntil;
      return push(later);
    }
    if (event.kind == Kind::kAsk) return ask(event.to);
    if (!rank.machine) return;
    ViewAgreement& machine = *rank.machine;
    switch (event.kind) {
      case Kind::kReport:
      case Kind::kGoodbye:
        if (rank.linksDown[event.from]) return;
        receive(event.to, event.from, event.number);
        if (event.kind == Kind::kGoodbye && life(event.to) == Life::kRunning) {
          if (const auto number = numberAt(event.to, event.from))
            act(event.to, machine.left(*number, clock()));
        }
        return;
      case Kind::kWitness:
      case Kind::kTestify: {
        const bool isRead = event.kind == Kind::kWitness;
        // A candidate may have counted on that rank, so this is as good as a suspicion.
        suspicious_ = suspicious_ || (!isRead && admits_);
        if (isRead) receive(event.to, event.from, ranks_[event.from].published);
        const auto number = numberAt(event.to, event.from);
        if (life(event.to) != Life::kRunning || !number) return;
        if (isRead && life(event.from) == Life::kLeft)
          return act(event.to, machine.left(*number, clock()));
        return act(event.to,
                   machine.exited({*number}, isRead ? LastReport::kReceived : LastReport::kUnknown,
                                  clock()));
      }
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
        for (int r = 0; r < processes(); ++r) {
          hear(r, event.to);
          // Time in which the detector is stopped does not count.
          Time& since = rank.deafSince[r];
          if (since != kNever) since = rank.stoppedUntil;
        }
        push({.when = rank.stoppedUntil, .kind = Kind::kScan, .to = event.to});
        scanLater(event.to, rank.stoppedUntil);
        return;
      case Kind::kSuspect:
        if (const auto number = numberAt(event.to, event.from)) {
          suspicious_ = true;
          blamed_.add(event.from);
          act(event.to, machine.suspected({*number}, Cause::kRefused, clock()));
        }
        return;
      case Kind::kConnected:
        return letIn(event.to, event.from);
      case Kind::kAsk:
      case Kind::kLink:
      case Kind::kKill:
        return;
    }
  }

  // `to` gets a report of `from`. A process that it has taken out hears why.
  void receive(int to, int from, int number) {
    ViewReport report = reports_[number];
    if (const auto sender = numberAt(to, from)) {
      report.from = *sender;
      return act(to, ranks_[to].machine->received(report, clock()));
    }
    if (ranks_[to].known.contains(from)) {
      ranks_[to].unsent.add(from);
      return sendReports(to);
    }
    report.from = ranks_[to].machine->enlist(ranks_[from].seat, idOf(from));
    act(to, ranks_[to].machine->received(report, clock()));
  }

  // A candidate asks a member that would let it in, and connects to all of its view.
  void ask(int process) {
    Rank& self = ranks_[process];
    if (self.life != Life::kRunning || (self.machine && self.machine->takesPart())) return;
    if (++self.tries > 100) return die(process, Life::kOver);
    push({.when = now_ + between(Time(50'000), Time(150'000)), .kind = Kind::kAsk, .to = process});
    const int first = below(processes());
    for (int i = 0; i < processes(); ++i) {
      const int member = (first + i) % processes();
      Rank& other = ranks_[member];
      if (life(member) != Life::kRunning || !hasEntered(member) || !isLinked(process, member) ||
          !other.machine->mayAdmit(self.seat))
        continue;
      bool isConnected = true;
      other.view.forEach([&](int r) {
        isConnected = isConnected && isLinked(process, r) && life(r) == Life::kRunning;
      });
      if (!isConnected) return;
      makeMachine(process, other.machine->term());
      self.known = other.known;
      self.joined = other.joined;
      self.view = processesOf(*other.machine, other.machine->term().active());
      self.askedTerm = other.machine->term().id();
      self.askedEpoch = other.machine->view().epoch;
      other.view.forEach([&](int r) {
        push({.when = now_ + between(network_.minDelay, network_.maxDelay),
              .kind = Kind::kConnected,
              .to = r,
              .from = process});
      });
      return;
    }
  }
  bool isLinked(int a, int b) const { return !ranks_[a].linksDown[b] && !ranks_[b].linksDown[a]; }
  void letIn(int member, int process) {
    ViewAgreement& machine = *ranks_[member].machine;
    const Rank& candidate = ranks_[process];
    if (life(process) != Life::kRunning || !isLinked(member, process) ||
        machine.term().id() != candidate.askedTerm ||
        machine.view().epoch != candidate.askedEpoch || !machine.mayAdmit(candidate.seat) ||
        excludes(member, process))
      return;
    act(member, machine.admit(candidate.seat, idOf(process), clock()));
  }

  using LastReport = ViewAgreement::LastReport;

  void trace(const Event& event) const {
    static constexpr const char* kNames[] = {"report", "goodbye", "witness", "testify",  "scan",
                                             "tick",   "send",    "kill",    "leave",    "link",
                                             "stop",   "suspect", "ask",     "connected"};
    std::cerr << now_.count() << " us: rank " << event.to << " of " << text(ranks_[event.to].view)
              << " gets " << kNames[int(event.kind)] << " of " << event.from << ", "
              << event.number;
    if (event.kind == Kind::kReport || event.kind == Kind::kGoodbye ||
        event.kind == Kind::kWitness) {
      const ViewReport& report = event.kind == Kind::kWitness
                                     ? reports_[ranks_[event.from].published]
                                     : reports_[event.number];
      std::cerr << ": committed " << text(report.committed) << " gone " << text(report.gone)
                << " settled " << text(report.settled) << " suspected " << text(report.suspected)
                << " term " << report.term.number << " joins";
      for (const Join& join : report.joins)
        std::cerr << " " << processOf(join.id) << ":" << int(join.state);
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
                       now_ >= other.stoppedUntil && !(other.machine && excludes(from, rank));
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
    const ViewAgreement& self = machine(rank);
    for (int r = 0; r < processes(); ++r) {
      hear(r, rank);  // `rank` may have been continued
      const Time since = ranks_[rank].deafSince[r];
      const auto number = numberAt(rank, r);
      if (r == rank || !number || since == kNever || now_ - since < kFailureTimeout) continue;
      if ((self.view().active | self.joins()).contains(*number)) silent.add(*number);
    }
    if (silent.empty()) return;
    suspicious_ = suspicious_ || !silent.isSubsetOf(machine(rank).report().gone);
    blamed_ |= processesOf(self, silent);
    act(rank, ranks_[rank].machine->suspected(silent, Cause::kSilent, clock()));
  }

  void act(int rank, const ViewActions& actions) {
    Rank& self = ranks_[rank];
    self.accused.insert(self.accused.end(), actions.accused.begin(), actions.accused.end());
    const bool isOver = actions.minority || actions.evicted;
    if (actions.commit && (actions.next.empty() || !isOver)) committed(rank, actions);
    self.known |= processesOf(*self.machine, self.machine->joins());
    self.unsent |= processesOf(*self.machine, actions.sendTo);
    for (const auto& next : actions.next) {
      for (const EngineId& id : next.excluded) self.unsent.add(processOf(id));
    }
    if (!self.unsent.empty()) {
      if (network_.gathers == Time(0)) {
        sendReports(rank);
      } else {
        push({.when = now_ + network_.gathers, .kind = Kind::kSend, .to = rank});
      }
    }
    if (life(rank) != Life::kRunning) return;
    if (isOver) {
      self.minority = actions.minority;
      self.evicted = actions.evicted;
      if (!suspicious_ && rank < size())
        fail("rank " + std::to_string(rank) + " is over though nobody suspects");
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
    std::exchange(self.unsent, {}).forEach([&](int to) {
      const auto number = numberAt(rank, to);
      if (!alive || (number && self.machine->report().gone.contains(*number))) return;
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
    if (!self.machine) return die(rank, how);
    self.published = keep(self.machine->report());
    for (int r = 0; r < processes(); ++r) {
      if (r == rank || !ranks_[r].machine) continue;
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
    for (int r = 0; r < processes(); ++r) {
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

  void committed(int rank, const ViewActions& actions) {
    lastCommit_ = now_;
    Rank& self = ranks_[rank];
    const ViewAgreement& machine = *self.machine;
    const JobRanks before = self.view;
    for (size_t i = 0; i < actions.next.size(); ++i) {
      for (const auto& holder : actions.next[i].term.holders) {
        if (holder && !self.known.contains(processOf(holder->id)))
          self.known.add(processOf(holder->id));
        if (holder && processOf(holder->id) >= size()) self.joined.add(processOf(holder->id));
      }
    }
    if (!actions.next.empty()) {
      for (const auto& one : machine.report().close->newcomers) {
        self.joined.add(processOf(one.id));
        self.known.add(processOf(one.id));
      }
    }
    self.view = processesOf(machine, actions.commit->active);
    const JobRanks out = (JobRanks::firstRanks(size()) | self.joined) - self.view;
    const std::string name = "rank " + std::to_string(rank) + " commits " + text(self.view) +
                             " of epoch " + std::to_string(actions.commit->epoch);
    if (actions.next.size() < 2 && actions.commit->epoch != 1u + out.count() + self.joined.count())
      fail(name + " with a wrong epoch");
    if (*actions.commit != machine.view()) fail(name + " which is not its view");
    if (!self.view.contains(rank) && !machine.isCandidate()) fail(name + " without itself");
    if ((self.view & before).empty()) fail(name + ", in which all are newcomers");
    out.forEach([&](int r) {
      if (life(r) == Life::kRunning && !blamed_.contains(r) && r < size())
        fail(name + " without rank " + std::to_string(r) + ", which nobody had a reason to accuse");
    });
    Commit* known = nullptr;
    for (Commit& other : commits_) {
      const bool isSame = other.out == out && other.joined == self.joined;
      if (isSame) known = &other;
      bool binds = false;
      other.by.forEach([&](int r) { binds = binds || life(r) != Life::kDead; });
      const bool isBefore = other.out.isSubsetOf(out) && other.joined.isSubsetOf(self.joined);
      const bool isBehind = out.isSubsetOf(other.out) && self.joined.isSubsetOf(other.joined);
      if (binds && !isBefore && !isBehind)
        fail(name + ", out " + text(out) + " joined " + text(self.joined) + ", against out " +
             text(other.out) + " joined " + text(other.joined) + " of " + text(other.by));
    }
    if (!known) known = &commits_.emplace_back(Commit{out, self.joined, actions.commit->epoch, {}});
    known->by.add(rank);
    out.forEach([&](int r) { hear(r, rank); });
  }

  void checkEviction(int rank, const ViewActions::Eviction& eviction) {
    if (!hasEntered(rank)) return;  // a candidate gives up at the first word that it is out
    for (const Commit& commit : commits_) {
      if (commit.out.contains(rank) && (commit.epoch == eviction.epoch || admits_)) return;
    }
    fail("rank " + std::to_string(rank) + " is evicted by a view that nobody has committed");
  }

  const Network network_;
  std::mt19937_64 random_;
  const int size_;
  const bool admits_;
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
