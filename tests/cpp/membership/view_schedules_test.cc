#include <cstdlib>
#include <functional>
#include <gtest/gtest.h>
#include <span>
#include <string>

#include "view_sim.h"

// Random schedules. MOONCAKE_TEST_SCHEDULES: their number (100000 take half a minute, run them
// after a change; a single one is printed step by step). MOONCAKE_TEST_SEED: seed of the first one.
namespace mooncake {
namespace {

using Time = ViewSim::Time;

uint64_t numberIn(const char* text, uint64_t otherwise) {
  return text ? std::strtoull(text, nullptr, 10) : otherwise;
}

// Returns a size from 2 to 64, 8 on average.
int drawSize(std::mt19937_64& random) {
  std::geometric_distribution<int> more(1.0 / 7);
  return 2 + std::min(more(random), 62);
}

constexpr Time kFaults{3'000'000};  // faults begin within this time

struct Schedule {
  ViewSim& sim;

  int someRank() const { return sim.below(sim.size()); }
  Time sometime() const { return sim.between(Time(0), kFaults); }
  // Often close to the other event, or to the moment of its detection. These times are critical.
  Time aboutThen(Time then) const {
    switch (sim.below(4)) {
      case 0:
        return sometime();
      case 1:
        return then + ViewSim::kFailureTimeout + sim.between(Time(0), Time(50'000));
      default:
        return then + sim.between(Time(0), Time(5000));
    }
  }
  JobRanks someHosts() const {
    JobRanks side;
    bool in = false;
    for (int r = 0; r < sim.size(); ++r) {
      if (r == 0 || !sim.sameHost(r, r - 1)) in = sim.chance(0.5);
      if (in) side.add(r);
    }
    return side;
  }
  void expectRunning(const JobRanks& expected) const {
    EXPECT_EQ(ViewSim::text(sim.running()), ViewSim::text(expected));
  }
};

// Exits and goodbyes only, so no rank needs a quorum.
void exitsOnly(const Schedule& s) {
  s.sim.launcherTestifies = true;
  JobRanks rest = JobRanks::firstRanks(s.sim.size());
  const Time then = s.sometime();
  for (int i = s.sim.below(s.sim.size()); i > 0; --i) {
    const int rank = s.someRank();
    rest -= JobRanks{rank};
    if (s.sim.chance(0.2)) {
      s.sim.leaveAt(s.aboutThen(then), rank);
    } else {
      s.sim.killAt(s.aboutThen(then), rank, s.sim.chance(0.5) ? s.sim.below(s.sim.size()) : 0);
    }
  }
  s.sim.run();
  // A rank that was to die while it sends may have had nothing to send.
  EXPECT_TRUE(rest.isSubsetOf(s.sim.running()));
}

// A partition that stays: all of the side with the quorum goes on, and the other side
// ends as the minority.
void partition(const Schedule& s) {
  const JobRanks all = JobRanks::firstRanks(s.sim.size()), side = s.someHosts();
  s.sim.partitionAt(s.sometime(), side);
  s.sim.run();
  const int twice = 2 * side.count() - s.sim.size();
  const bool sideGoesOn = twice > 0 || (twice == 0 && side.contains(0));
  s.expectRunning(sideGoesOn ? side : all - side);
}

// One link breaks, in one direction or both. One rank is lost.
void brokenLink(const Schedule& s) {
  const int a = s.someRank(), b = s.someRank();
  const Time then = s.sometime();
  s.sim.cutAt(then, a, b);
  if (s.sim.chance(0.5)) s.sim.cutAt(then, b, a);
  s.sim.run();
  EXPECT_EQ(s.sim.running().count(), s.sim.size() - (s.sim.sameHost(a, b) ? 0 : 1));
}

// A stopped rank that comes back finds itself evicted, unless it is needed for the quorum.
void stoppedRank(const Schedule& s) {
  const int rank = s.someRank();
  const Time then = s.sometime();
  const Time pause = s.sim.between(Time(0), Time(1'800'000));
  s.sim.stopAt(then, rank, then + pause);
  s.sim.run();
  if (pause < ViewSim::kFailureTimeout) {
    s.expectRunning(JobRanks::firstRanks(s.sim.size()));
  } else if (pause > ViewSim::kFailureTimeout + Time(200'000) && (s.sim.size() > 2 || rank == 1)) {
    s.expectRunning(JobRanks::firstRanks(s.sim.size()) - JobRanks{rank});
    EXPECT_TRUE(s.sim.evicted(rank));
  }
}

// A rank that hears no other rank, though all hear it. Only it is lost, because no rank believes an
// accuser of all. (If other ranks run on its host, it hears these, and they believe it.)
void deafRank(const Schedule& s) {
  const int rank = s.someRank();
  const Time then = s.sometime();
  for (int r = 0; r < s.sim.size(); ++r) s.sim.cutAt(then, r, rank);
  s.sim.run();
  if (s.sim.size() > 2 && !s.sim.sameHost(0, 1))
    s.expectRunning(JobRanks::firstRanks(s.sim.size()) - JobRanks{rank});
}

void everything(const Schedule& s) {
  ViewSim& sim = s.sim;
  sim.launcherTestifies = sim.chance(0.3);
  const Time then = s.sometime();
  for (int i = 1 + sim.below(std::min(8, sim.size() + 1)); i > 0; --i) {
    const Time when = s.aboutThen(then);
    const int rank = s.someRank();
    const Time until = sim.chance(0.5) ? s.aboutThen(then) : when + s.sometime();
    switch (sim.below(10)) {
      case 0:
      case 1:
        sim.killAt(when, rank);
        break;
      case 2:
        sim.killAt(when, rank, 1 + sim.below(sim.size()));
        break;
      case 3:
        sim.leaveAt(when, rank);
        break;
      case 4:
      case 5: {
        const JobRanks side = s.someHosts();
        sim.partitionAt(when, side);
        if (sim.chance(0.5)) sim.partitionAt(until, side, false);
        break;
      }
      case 6: {
        const int other = s.someRank();
        sim.cutAt(when, rank, other);
        if (sim.chance(0.5)) sim.cutAt(until, rank, other, false);
        break;
      }
      case 7:
        sim.stopAt(when, rank, until);
        break;
      default:
        sim.suspectAt(when, rank, s.someRank());
        if (sim.chance(0.3)) sim.suspectAt(when, s.someRank(), rank);
    }
  }
  sim.run();
}

// A rank ends, and a candidate takes its place.
void replacement(const Schedule& s) {
  ViewSim& sim = s.sim;
  const int rank = s.someRank();
  const Time then = s.sometime();
  const bool staysQuorum = sim.size() > 2;
  const int newcomer = sim.joinAt(s.aboutThen(then), rank, sim.chance(0.5));
  if (sim.chance(0.3)) {
    sim.leaveAt(then, rank);
  } else {
    sim.killAt(then, rank);
  }
  sim.run();
  if (!staysQuorum) return;
  s.expectRunning((JobRanks::firstRanks(sim.size()) - JobRanks{rank}) | JobRanks{newcomer});
  EXPECT_TRUE(sim.hasEntered(newcomer));
}

// Candidates, for ranks that end and for ranks that live, two for one rank, among all else that may
// happen to them and to the members.
void candidates(const Schedule& s) {
  ViewSim& sim = s.sim;
  sim.launcherTestifies = sim.chance(0.3);
  const Time then = s.sometime();
  const int first = s.someRank();
  if (sim.chance(0.8)) sim.killAt(then, first);
  for (int i = 1 + sim.below(3); i > 0; --i)
    sim.joinAt(s.aboutThen(then), sim.chance(0.7) ? first : s.someRank(), sim.chance(0.5));
  const auto someProcess = [&] { return sim.below(sim.processes()); };
  for (int i = sim.below(5); i > 0; --i) {
    const Time when = s.aboutThen(then);
    const Time until = sim.chance(0.5) ? s.aboutThen(then) : when + s.sometime();
    const int process = someProcess();
    switch (sim.below(9)) {
      case 0:
        sim.killAt(when, process);
        break;
      case 1:
        sim.killAt(when, process, 1 + sim.below(sim.size()));
        break;
      case 2:
        sim.leaveAt(when, process);
        break;
      case 3: {
        JobRanks side = s.someHosts();
        for (int p = sim.size(); p < sim.processes(); ++p) {
          if (sim.chance(0.5)) side.add(p);
        }
        sim.partitionAt(when, side);
        if (sim.chance(0.5)) sim.partitionAt(until, side, false);
        break;
      }
      case 4:
      case 5: {
        const int other = someProcess();
        sim.cutAt(when, process, other);
        if (sim.chance(0.5)) sim.cutAt(when, other, process);
        if (sim.chance(0.3)) sim.cutAt(until, process, other, false);
        break;
      }
      case 6:
        sim.stopAt(when, process, until);
        break;
      default:
        sim.suspectAt(when, process, someProcess());
    }
  }
  sim.run();
}

struct Kind {
  const char* name;
  void (*play)(const Schedule&);
  bool networkIsGood;  // the outcome can be predicted only with a good network
};
constexpr Kind kKinds[] = {
    {"exits only", exitsOnly, false},  {"partition", partition, true},
    {"broken link", brokenLink, true}, {"stopped rank", stoppedRank, true},
    {"deaf rank", deafRank, true},     {"everything", everything, false},
};

constexpr Kind kWithCandidates[] = {
    {"replacement", replacement, true},
    {"candidates", candidates, false},
};

// `kinds`: the last one is drawn for all numbers beyond them.
void playSchedule(uint64_t seed, std::span<const Kind> kinds, bool admits, bool traces) {
  std::mt19937_64 random(seed);
  const int size = admits ? 2 + static_cast<int>(random() % 4) : drawSize(random);
  const int perHost = 1 + static_cast<int>(random() % std::min(size, 8));
  const size_t draw = random() % 16;
  const Kind& kind = kinds[std::min(draw, kinds.size() - 1)];
  ViewSim::Network network;
  if (!kind.networkIsGood) {
    if (random() % 2 == 0) network.loss = static_cast<double>(random() % 4) / 10;
    if (random() % 2 == 0) network.duplication = 0.1;
    if (random() % 2 == 0) network.maxDelay = Time(15'000);
    if (random() % 4 == 0) network.slowDelay = Time(400'000);
    network.garbles = random() % 4 == 0;
    if (random() % 4 == 0) network.gathers = Time(500);
  }
  ViewSim sim(size, perHost, network, random(), admits);
  sim.traces = traces;
  SCOPED_TRACE(
      std::string(kind.name) + ", " + std::to_string(size) + " ranks, " + std::to_string(perHost) +
      " per host; again: MOONCAKE_TEST_SCHEDULES=1 MOONCAKE_TEST_SEED=" + std::to_string(seed));
  kind.play(Schedule{sim});
  if (sim.failures().empty()) sim.expectAgreement();
  for (const std::string& failure : sim.failures()) ADD_FAILURE() << failure;
}

void playSchedules(uint64_t usually, std::span<const Kind> kinds, bool admits) {
  const uint64_t seed = numberIn(std::getenv("MOONCAKE_TEST_SEED"), 1);
  const uint64_t count = numberIn(std::getenv("MOONCAKE_TEST_SCHEDULES"), usually);
  for (uint64_t i = 0; i < count && !::testing::Test::HasFailure(); ++i)
    playSchedule(seed + i, kinds, admits, count == 1);
}

TEST(ViewSchedules, KeepTheInvariants) { playSchedules(5000, kKinds, false); }

TEST(ViewSchedules, KeepTheInvariantsWithCandidates) { playSchedules(3000, kWithCandidates, true); }

}  // namespace
}  // namespace mooncake
