// Measures network cards, through our Nic and bare. See usage() and docs/fabric.md.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <map>
#include <string>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>

#include "fabric/bare.h"
#include "fabric/crew.h"
#include "fabric/station.h"
#include "wires/nic/libfabric/cards.h"

namespace mooncake::bench {
namespace {

constexpr const char* kUsage =
    "fabric_bench WHAT [--provider P] [--devices A,B] [--ranks N] [--bytes N,N...] [--depth N]\n"
    "             [--seconds S] [--rounds N] [--copies N] [--spin] [--json]\n"
    "             [--rank R --meet HOST:PORT]     one process of several that are started by hand\n"
    "  WHAT: send, write, read   one rank to another one, on one card\n"
    "        all-to-all          every rank writes to every other one\n"
    "        cards               several cards: blocks in turn, against each block split\n"
    "        ceiling             send, write and read against a bare loop of the provider's "
    "calls,\n"
    "                            round by round in the same run, and fi_pingpong beside it\n"
    "        first-submit        how long a first write takes, and a warm-up of all pairs of "
    "cards\n"
    "                            (--copies 16: as many cards as a p5en has, of one device)\n";

struct Options {
  std::string what, meet;
  FabricEnv env;
  int ranks = 2, rank = -1;
  std::vector<size_t> bytes{65536, 262144, 1 << 20, 4 << 20};
  size_t depth = 16, copies = 1, rounds = 5;
  double seconds = 0.3;
  bool spins = false, asJson = false, isLocal = false;
};

std::vector<std::string> splitAt(const std::string& text, char separator) {
  std::vector<std::string> parts(1);
  for (const char c : text) {
    if (c == separator) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  return parts;
}

Options parse(int count, char** words) {
  Options options;
  if (count < 2) die(std::string("\n") + kUsage);
  options.what = words[1];
  options.env = orDie(FabricEnv::read());
  for (int i = 2; i < count; ++i) {
    const std::string name = words[i];
    if (name == "--spin") {
      options.spins = true;
      continue;
    }
    if (name == "--json") {
      options.asJson = true;
      continue;
    }
    if (i + 1 == count) die(std::string("\n") + kUsage);
    const std::string value = words[++i];
    if (name == "--provider") {
      options.env.requiredProvider = value;
    } else if (name == "--devices") {
      options.env.devices = splitAt(value, ',');
    } else if (name == "--ranks") {
      options.ranks = std::stoi(value);
    } else if (name == "--rank") {
      options.rank = std::stoi(value);
    } else if (name == "--meet") {
      options.meet = value;
    } else if (name == "--depth") {
      options.depth = std::stoul(value);
    } else if (name == "--copies") {
      options.copies = std::stoul(value);
    } else if (name == "--rounds") {
      options.rounds = std::stoul(value);
    } else if (name == "--seconds") {
      options.seconds = std::stod(value);
    } else if (name == "--bytes") {
      options.bytes.clear();
      for (const std::string& one : splitAt(value, ',')) options.bytes.push_back(std::stoul(one));
    } else {
      die(std::string("no option ") + name + "\n" + kUsage);
    }
  }
  return options;
}

// One line of a table, for people or as JSON.
class Table {
 public:
  Table(const Options& options, const Crew& crew)
      : asJson_(options.asJson), isMine_(crew.rank() == 0), what_(options.what) {}

  void row(const std::vector<std::pair<std::string, std::string>>& cells) {
    if (!isMine_) return;
    if (asJson_) {
      std::string line = "{\"what\": \"" + what_ + "\"";
      for (const auto& [name, value] : cells) {
        const bool isNumber = value.find_first_not_of("0123456789.-") == std::string::npos;
        line += ", \"" + name + "\": " + (isNumber ? value : "\"" + value + "\"");
      }
      std::printf("%s}\n", line.c_str());
    } else {
      if (!hasHead_) {
        for (const auto& cell : cells) std::printf("%14s", cell.first.c_str());
        std::printf("\n");
      }
      for (const auto& cell : cells) std::printf("%14s", cell.second.c_str());
      std::printf("\n");
    }
    hasHead_ = true;
    std::fflush(stdout);
  }

 private:
  const bool asJson_, isMine_;
  const std::string what_;
  bool hasHead_ = false;
};

std::string text(double value, int digits = 3) {
  char buffer[64];
  std::snprintf(buffer, sizeof(buffer), "%.*f", digits, value);
  return buffer;
}

const std::map<std::string, Verb> kVerbs = {
    {"send", Verb::kSend}, {"write", Verb::kWrite}, {"read", Verb::kRead}};

size_t memoryFor(const Options& options) {
  return std::max<size_t>(64 << 20,
                          4 * *std::max_element(options.bytes.begin(), options.bytes.end()));
}

Station::Plan onOneCard(size_t bytes, size_t memory) {
  return [=](size_t i, std::vector<Station::Piece>& pieces) {
    pieces.push_back({0, i % (memory / bytes) * bytes, bytes});
  };
}

Station::Plan inTurn(size_t bytes, size_t memory, size_t cards) {
  return [=](size_t i, std::vector<Station::Piece>& pieces) {
    pieces.push_back({i % cards, i % (memory / bytes) * bytes, bytes});
  };
}

Station::Plan split(size_t bytes, size_t memory, size_t cards) {
  return [=](size_t i, std::vector<Station::Piece>& pieces) {
    const uint64_t start = i % (memory / bytes) * bytes, part = bytes / cards;
    for (size_t c = 0; c < cards; ++c)
      pieces.push_back({c, start + c * part, c + 1 == cards ? bytes - c * part : part});
  };
}

void onePair(const Options& options, Crew& crew, Verb verb) {
  Station station(crew, options.env, memoryFor(options), 1, options.spins);
  Table table(options, crew);
  for (const size_t bytes : options.bytes) {
    crew.barrier();
    double rate = 0;
    if (crew.rank() == 0) {
      rate = station.stream(verb, {1}, onOneCard(bytes, memoryFor(options)), options.depth,
                            options.seconds);
    }
    station.attend();
    table.row({{"provider", station.card(0).provider()},
               {"bytes", std::to_string(bytes)},
               {"GB/s", text(rate / 1e9)},
               {"us/block", text(static_cast<double>(bytes) / rate * 1e6, 1)}});
  }
}

void allToAll(const Options& options, Crew& crew) {
  Station station(crew, options.env, memoryFor(options), 1, options.spins);
  Table table(options, crew);
  std::vector<int> others;
  for (int r = 0; r < crew.size(); ++r) {
    if (r != crew.rank()) others.push_back(r);
  }
  for (const size_t bytes : options.bytes) {
    crew.barrier();
    const double rate =
        station.stream(Verb::kWrite, others, onOneCard(bytes, memoryFor(options)),
                       std::max<size_t>(1, options.depth / others.size()), options.seconds);
    station.attend();
    double sum = 0;
    for (const Bytes& told : crew.exchange(std::as_bytes(std::span(&rate, 1)))) {
      double theirs = 0;
      std::memcpy(&theirs, told.data(), sizeof(theirs));
      sum += theirs;
    }
    table.row({{"provider", station.card(0).provider()},
               {"ranks", std::to_string(crew.size())},
               {"bytes", std::to_string(bytes)},
               {"GB/s each", text(sum / crew.size() / 1e9)},
               {"GB/s all", text(sum / 1e9)}});
  }
}

void overCards(const Options& options, Crew& crew) {
  Station station(crew, options.env, memoryFor(options), options.copies, options.spins);
  Table table(options, crew);
  const size_t cards = station.cards(), memory = memoryFor(options);
  for (const size_t bytes : options.bytes) {
    double rates[4] = {};
    for (int one = 0; one < 4; ++one) {
      crew.barrier();
      const auto plan = one % 2 == 0 ? inTurn(bytes, memory, cards) : split(bytes, memory, cards);
      const size_t depth = one < 2 ? options.depth : 1;
      if (crew.rank() == 0)
        rates[one] = station.stream(Verb::kWrite, {1}, plan, depth, options.seconds);
      station.attend();
    }
    const auto micros = [&](double rate) {
      return text(static_cast<double>(bytes) / rate * 1e6, 1);
    };
    table.row({{"cards", std::to_string(cards)},
               {"bytes", std::to_string(bytes)},
               {"in turn GB/s", text(rates[0] / 1e9)},
               {"split GB/s", text(rates[1] / 1e9)},
               {"in turn us", micros(rates[2])},
               {"split us", micros(rates[3])}});
  }
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// Rate in MB/s according to the provider's own tool, with one block there and back at a time. "-"
// if it is not installed, or if the ranks are on several hosts.
std::string pingpong(const Options& options, size_t bytes) {
  if (!options.isLocal || options.env.requiredProvider.empty()) return "-";
  const std::string port = std::to_string(20000 + ::getpid() % 20000);
  const std::string tool = "timeout 20 fi_pingpong -e rdm -I 100 -p '" +
                           options.env.requiredProvider + "' -S " + std::to_string(bytes);
  // The client repeats its call until the server listens.
  const std::string command = "{ " + tool + " -B " + port +
                              " >/dev/null 2>&1 & } ; for i in 1 2 3 4 5" + "; do sleep 0.2; " +
                              tool + " -P " + port +
                              " 127.0.0.1 2>/dev/null && break; done; kill $! 2>/dev/null";
  FILE* output = ::popen(command.c_str(), "r");
  if (output == nullptr) return "-";
  char line[256];
  std::string rate = "-";
  while (std::fgets(line, sizeof(line), output) != nullptr) {
    char cells[7][32];
    const int count = std::sscanf(line, "%31s %31s %31s %31s %31s %31s %31s", cells[0], cells[1],
                                  cells[2], cells[3], cells[4], cells[5], cells[6]);
    if (count == 7 && std::strcmp(cells[0], "bytes") != 0) rate = cells[5];
  }
  ::pclose(output);
  return rate;
}

void ceiling(const Options& options, Crew& crew) {
  const size_t memory = memoryFor(options);
  Station station(crew, options.env, memory, 1, options.spins);
  Bare bare(crew, options.env, station, options.spins);
  Table table(options, crew);
  std::map<size_t, std::string> beside;
  if (crew.rank() == 0) {
    for (const size_t bytes : options.bytes) beside[bytes] = pingpong(options, bytes);
  }
  for (const auto& [name, verb] : kVerbs) {
    for (const size_t bytes : options.bytes) {
      std::vector<double> ours, theirs, ratios;
      for (size_t round = 0; round < options.rounds; ++round) {
        double rate = 0, ceiling = 0;
        crew.barrier();
        if (crew.rank() == 0)
          rate =
              station.stream(verb, {1}, onOneCard(bytes, memory), options.depth, options.seconds);
        station.attend();
        crew.barrier();
        if (crew.rank() == 0) ceiling = bare.stream(verb, bytes, options.depth, options.seconds);
        bare.attend();
        ours.push_back(rate);
        theirs.push_back(ceiling);
        ratios.push_back(rate / ceiling);
      }
      table.row({{"verb", name},
                 {"bytes", std::to_string(bytes)},
                 {"ours GB/s", text(median(ours) / 1e9)},
                 {"bare GB/s", text(median(theirs) / 1e9)},
                 {"ratio", text(median(ratios))},
                 {"least", text(*std::min_element(ratios.begin(), ratios.end()))},
                 {"pingpong MB/s", beside[bytes]}});
    }
  }
}

void firstSubmit(const Options& options, Crew& crew) {
  Table table(options, crew);
  for (size_t round = 0; round < options.rounds; ++round) {
    Station station(crew, options.env, 4 << 20, options.copies, options.spins);
    Station::FirstSubmits times;
    crew.barrier();
    if (crew.rank() == 0) times = station.firstSubmits(1);
    station.attend();
    const size_t pairs = station.cards() * station.cards();
    table.row({{"provider", station.card(0).provider()},
               {"pairs", std::to_string(pairs)},
               {"first us", text(times.first, 0)},
               {"insert us", text(times.insertAll, 0)},
               {"warm-up us", text(times.allFirst, 0)},
               {"later us", text(times.second, 0)}});
  }
}

void run(Options options, char** words) {
  if (options.rank < 0) {
    options.rank = 0;
    options.isLocal = true;
    options.meet = startOthers(options.ranks, words);
  }
  Crew crew(options.rank, options.ranks, options.meet);
  if (const auto verb = kVerbs.find(options.what); verb != kVerbs.end()) {
    onePair(options, crew, verb->second);
  } else if (options.what == "all-to-all") {
    allToAll(options, crew);
  } else if (options.what == "cards") {
    overCards(options, crew);
  } else if (options.what == "ceiling") {
    ceiling(options, crew);
  } else if (options.what == "first-submit") {
    firstSubmit(options, crew);
  } else {
    die("no such measurement: " + options.what + "\n" + kUsage);
  }
  crew.barrier();
}

}  // namespace
}  // namespace mooncake::bench

int main(int count, char** words) {
  mooncake::bench::run(mooncake::bench::parse(count, words), words);
  while (::wait(nullptr) > 0) {
  }
  return 0;
}
