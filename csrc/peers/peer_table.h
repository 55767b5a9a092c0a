#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/result.h"

namespace mooncake {

// The forms of collectives by kernels, by the number of ranks and the size of a rank's input, as
// benchmarks/bench_peer_table.py measures them.
class PeerTable {
 public:
  static constexpr unsigned kMostBlocks = 8;  // multiprocessors that a group takes at most
  struct Form {
    bool isTwoShot = false;
    unsigned blocks = 1;
  };

  // Reads a file. Each line is "VERB RANKS BYTES EXCHANGES BLOCKS", and holds for inputs of BYTES
  // and more, up to the next line of the verb with as many ranks. '#' begins a comment.
  // kInvalidArgument: the file cannot be read, or a line is wrong; the error names both.
  static Result<PeerTable> read(const std::string& path);
  // The same of a text; `name` stands for the file in errors.
  static Result<PeerTable> parse(std::string_view text, const std::string& name);

  // None: there is no line for such a call.
  std::optional<Form> find(std::string_view verb, int ranks, size_t bytes) const;
  // Equal for equal lines.
  uint32_t hash() const;

 private:
  struct Line {
    std::string verb;
    int ranks = 0;
    size_t bytes = 0;
    Form form;
  };
  static Result<Line> parseLine(const std::vector<std::string_view>& words);

  std::vector<Line> lines_;  // by verb, ranks and bytes
};

}  // namespace mooncake
