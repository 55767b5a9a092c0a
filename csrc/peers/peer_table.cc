#include "peers/peer_table.h"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>
#include <tuple>
#include <utility>

#include "base/hash.h"
#include "kernels/group_state.h"

namespace mooncake {
namespace {

constexpr std::string_view kVerbs[] = {"all_reduce", "reduce_scatter", "all_gather", "reduce",
                                       "broadcast",  "gather",         "scatter"};
constexpr size_t kMostBytes = size_t{1} << 50;

std::vector<std::string_view> wordsOf(std::string_view line) {
  constexpr std::string_view kSpace = " \t\r";
  std::vector<std::string_view> words;
  line = line.substr(0, line.find('#'));
  for (size_t end = 0;;) {
    const size_t begin = line.find_first_not_of(kSpace, end);
    if (begin == std::string_view::npos) return words;
    end = std::min(line.find_first_of(kSpace, begin), line.size());
    words.push_back(line.substr(begin, end - begin));
  }
}

Error wrong(const std::string& what) { return {ErrorCode::kInvalidArgument, what}; }

Result<size_t> numberIn(std::string_view word, const char* name, size_t least, size_t most) {
  size_t number = 0;
  const auto [end, error] = std::from_chars(word.data(), word.data() + word.size(), number);
  if (error == std::errc() && end == word.data() + word.size() && number >= least && number <= most)
    return number;
  return wrong(std::string(name) + " is '" + std::string(word) + "', and must be a number from " +
               std::to_string(least) + " to " + std::to_string(most));
}

}  // namespace

Result<PeerTable> PeerTable::read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::stringstream text;
  text << file.rdbuf();
  if (!file || text.bad())  // bad: it is a folder, for example
    return wrong("cannot read '" + path + "': " + std::strerror(errno));
  return parse(text.str(), path);
}

Result<PeerTable> PeerTable::parse(std::string_view text, const std::string& name) {
  PeerTable table;
  for (size_t number = 1, begin = 0; begin < text.size(); ++number) {
    const size_t end = std::min(text.find('\n', begin), text.size());
    const auto words = wordsOf(text.substr(begin, end - begin));
    begin = end + 1;
    if (words.empty()) continue;
    auto line = parseLine(words);
    if (!line.ok())
      return wrong(name + ", line " + std::to_string(number) + ": " + line.error().message);
    table.lines_.push_back(std::move(*line));
  }
  std::ranges::stable_sort(table.lines_, {}, [](const Line& line) {
    return std::tuple<const std::string&, int, size_t>(line.verb, line.ranks, line.bytes);
  });
  return table;
}

Result<PeerTable::Line> PeerTable::parseLine(const std::vector<std::string_view>& words) {
  if (words.size() != 5) return wrong("it must have VERB RANKS BYTES EXCHANGES BLOCKS");
  if (std::ranges::find(kVerbs, words[0]) == std::end(kVerbs)) {
    std::string known;
    for (const std::string_view verb : kVerbs) known.append(known.empty() ? "" : ", ").append(verb);
    return wrong("the verb '" + std::string(words[0]) + "' is none of " + known);
  }
  const auto ranks = numberIn(words[1], "RANKS", 1, kernels::kMaxRanks);
  if (!ranks.ok()) return ranks.error();
  const auto bytes = numberIn(words[2], "BYTES", 0, kMostBytes);
  if (!bytes.ok()) return bytes.error();
  // Two exchanges save nothing where there are two ranks.
  const size_t mostExchanges = words[0] == "all_reduce" && *ranks > 2 ? 2 : 1;
  const auto exchanges = numberIn(words[3], "EXCHANGES", 1, mostExchanges);
  if (!exchanges.ok()) return exchanges.error();
  const auto blocks = numberIn(words[4], "BLOCKS", 1, kMostBlocks);
  if (!blocks.ok()) return blocks.error();
  return Line{std::string(words[0]), int(*ranks), *bytes, {*exchanges == 2, unsigned(*blocks)}};
}

std::optional<PeerTable::Form> PeerTable::find(std::string_view verb, int ranks,
                                               size_t bytes) const {
  std::optional<Form> found;
  for (const Line& line : lines_)
    if (line.verb == verb && line.ranks == ranks && line.bytes <= bytes) found = line.form;
  return found;
}

uint32_t PeerTable::hash() const {
  uint32_t hash = fnv1a({lines_.size()});
  for (const Line& line : lines_) {
    for (const char letter : line.verb) hash = fnv1a({uint64_t(letter)}, hash);
    hash = fnv1a(
        {uint64_t(line.ranks), line.bytes, uint64_t(line.form.isTwoShot), line.form.blocks}, hash);
  }
  return hash;
}

}  // namespace mooncake
