#include "base/env.h"

#include <charconv>
#include <cstdlib>
#include <new>
#include <pthread.h>

namespace mooncake {

RecursiveMutex& environmentMutex() {
  alignas(RecursiveMutex) static std::byte memory[sizeof(RecursiveMutex)];
  static auto* const made = [] {
    ::pthread_atfork(nullptr, nullptr, [] { new (memory) RecursiveMutex; });
    return new (memory) RecursiveMutex;
  }();
  return *made;
}

std::optional<std::string_view> envValue(const char* name) {
  const char* value = std::getenv(name);
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

Error notAllowed(const EnvVariable& variable, std::string_view value, bool isSecret,
                 const std::string& allowed) {
  return {ErrorCode::kInvalidArgument,
          std::string(variable.name) +
              (isSecret ? " has " + std::to_string(value.size()) + " bytes, which "
                        : "=\"" + std::string(value) + "\" ") +
              "is not valid; allowed: " + allowed};
}

bool parseNumber(std::string_view value, uint64_t least, uint64_t most, uint64_t& number,
                 std::string& allowed) {
  allowed = "a whole number from " + std::to_string(least) + " to " + std::to_string(most);
  const char* end = value.data() + value.size();
  const auto [stop, error] = std::from_chars(value.data(), end, number);
  return error == std::errc() && stop == end && number >= least && number <= most;
}

bool parseFlag(std::string_view value, bool& flag, std::string& allowed) {
  allowed = "0 or 1";
  flag = value == "1";
  return value == "0" || value == "1";
}

bool parseNames(std::string_view value, std::vector<std::string>& names, std::string& allowed) {
  allowed = "names, separated by commas";
  names.clear();
  for (;;) {
    const size_t comma = value.find(',');
    if (comma == 0 || value.empty()) return false;
    names.emplace_back(value.substr(0, comma));
    if (comma == std::string_view::npos) return true;
    value.remove_prefix(comma + 1);
  }
}

}  // namespace mooncake
