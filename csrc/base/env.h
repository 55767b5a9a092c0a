#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "base/mutex.h"
#include "base/result.h"

// Tables of environment variables. The room that uses a variable has it in a table of its own, and
// reads that table into a struct of settings. There is no global state, so two objects made under
// different environments differ. docs/environment.md is generated from all tables.
namespace mooncake {

struct EnvVariable {
  const char* name;
  const char* defaultValue;
  const char* meaning;
};

// A line of a table: a variable of ours, and how its value gets into a field of `Settings`.
template <typename Settings>
struct EnvEntry {
  EnvVariable variable;
  // Stores the value and returns true. If it returns false, `allowed` says which values are valid.
  bool (*parse)(std::string_view value, Settings& settings, std::string& allowed);
  bool isSecret = false;  // no message may show the value
};

// Held while we read the process's environment, and while a library that may change it starts: a
// string that setenv() frees may still be read by another thread. Recursive, because the log reads
// its own level. In a forked child it is free, even if another thread held it at the fork.
RecursiveMutex& environmentMutex();

// Returns the value of a variable. None if it is not set, or empty: launchers often pass a variable
// that they lack as "". The caller holds environmentMutex() as long as it uses the value.
std::optional<std::string_view> envValue(const char* name) REQUIRES(environmentMutex());
// The error for a value that is not allowed: names the variable, the value unless it is secret, and
// the allowed values.
Error notAllowed(const EnvVariable& variable, std::string_view value, bool isSecret,
                 const std::string& allowed);

// Reads the variables of a table. kInvalidArgument: the first one that is not valid.
template <typename Settings, size_t kCount>
Result<Settings> readEnv(const EnvEntry<Settings> (&table)[kCount]) {
  Guard lock(environmentMutex());
  Settings settings;
  for (const EnvEntry<Settings>& entry : table) {
    const auto value = envValue(entry.variable.name);
    if (!value) continue;
    std::string allowed;
    if (!entry.parse(*value, settings, allowed))
      return notAllowed(entry.variable, *value, entry.isSecret, allowed);
  }
  return settings;
}

// Returns the variables of a table, without their parsers.
template <typename Settings, size_t kCount>
std::vector<EnvVariable> variablesOf(const EnvEntry<Settings> (&table)[kCount]) {
  std::vector<EnvVariable> variables;
  for (const EnvEntry<Settings>& entry : table) variables.push_back(entry.variable);
  return variables;
}

// Parsers of values, for the parsers of entries.
bool parseNumber(std::string_view value, uint64_t least, uint64_t most, uint64_t& number,
                 std::string& allowed);
bool parseFlag(std::string_view value, bool& flag, std::string& allowed);  // 0 or 1
// Names that are not empty, separated by commas.
bool parseNames(std::string_view value, std::vector<std::string>& names, std::string& allowed);

// Parsers of entries whose value is one field of the settings.

// A whole number of the field's unit, from kLeast to kMost. The field is an integer or a duration.
template <auto kField, uint64_t kLeast, uint64_t kMost, typename Settings>
bool numberInto(std::string_view value, Settings& settings, std::string& allowed) {
  uint64_t number = 0;
  const bool ok = parseNumber(value, kLeast, kMost, number, allowed);
  settings.*kField = static_cast<std::remove_reference_t<decltype(settings.*kField)>>(number);
  return ok;
}

template <auto kField, typename Settings>
bool flagInto(std::string_view value, Settings& settings, std::string& allowed) {
  return parseFlag(value, settings.*kField, allowed);
}

template <auto kField, typename Settings>
bool namesInto(std::string_view value, Settings& settings, std::string& allowed) {
  return parseNames(value, settings.*kField, allowed);
}

// Any text.
template <auto kField, typename Settings>
bool textInto(std::string_view value, Settings& settings, std::string&) {
  settings.*kField = value;
  return true;
}

}  // namespace mooncake
