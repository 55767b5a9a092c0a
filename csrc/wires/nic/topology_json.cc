#include "wires/nic/topology_json.h"

#include <optional>
#include <string_view>

namespace mooncake {
namespace {

// Reads from the front. After the first error every further read fails.
class Reader {
 public:
  explicit Reader(std::string_view text) : all_(text), left_(text) {}

  bool take(char wanted) {
    skipSpace();
    if (left_.empty() || left_.front() != wanted) return false;
    left_.remove_prefix(1);
    return true;
  }
  void expect(char wanted) {
    if (!take(wanted)) fail(std::string("'") + wanted + "'");
  }
  // Names of devices and locations need no escapes.
  std::string string() {
    expect('"');
    const size_t end = left_.find_first_of("\"\\");
    if (hasFailed()) return {};
    if (end == std::string_view::npos || left_[end] != '"') {
      fail("a name in quotes, without backslashes");
      return {};
    }
    std::string text(left_.substr(0, end));
    left_.remove_prefix(end + 1);
    return text;
  }
  std::vector<std::string> strings() {
    std::vector<std::string> list;
    expect('[');
    if (take(']')) return list;
    do {
      list.push_back(string());
    } while (!hasFailed() && take(','));
    expect(']');
    return list;
  }
  bool isAtEnd() {
    skipSpace();
    return left_.empty();
  }
  void fail(const std::string& wanted) {
    if (!error_) {
      error_ = "topology: at byte " + std::to_string(all_.size() - left_.size()) + " there is no " +
               wanted;
    }
    left_ = {};
  }
  bool hasFailed() const { return error_.has_value(); }
  const std::string& error() const { return *error_; }

 private:
  void skipSpace() {
    const size_t next = left_.find_first_not_of(" \t\r\n");
    left_.remove_prefix(next == std::string_view::npos ? left_.size() : next);
  }

  const std::string_view all_;
  std::string_view left_;
  std::optional<std::string> error_;
};

std::string quoted(const std::vector<std::string>& names) {
  std::string text = "[";
  for (const std::string& name : names) text += (text.size() > 1 ? ",\"" : "\"") + name + "\"";
  return text + "]";
}

}  // namespace

Result<std::map<std::string, NicTopology::Cards>> parseTopologyJson(const std::string& json) {
  std::map<std::string, NicTopology::Cards> locations;
  Reader in(json);
  in.expect('{');
  if (!in.take('}')) {
    do {
      const std::string location = in.string();
      in.expect(':');
      in.expect('[');
      NicTopology::Cards cards{.preferred = in.strings()};
      if (in.take(',')) cards.others = in.strings();
      in.expect(']');
      locations[location] = std::move(cards);
    } while (!in.hasFailed() && in.take(','));
    in.expect('}');
  }
  if (!in.hasFailed() && !in.isAtEnd()) in.fail("end");
  if (in.hasFailed()) return Error{ErrorCode::kInvalidArgument, in.error()};
  return locations;
}

std::string writeTopologyJson(const std::map<std::string, NicTopology::Cards>& locations) {
  std::string text = "{";
  for (const auto& [location, cards] : locations) {
    text += (text.size() > 1 ? ",\"" : "\"") + location + "\":[" + quoted(cards.preferred) + "," +
            quoted(cards.others) + "]";
  }
  return text + "}";
}

}  // namespace mooncake
