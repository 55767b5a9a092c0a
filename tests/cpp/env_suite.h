#pragma once

#include <cstdlib>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "base/env.h"

namespace mooncake::test {

using Values = std::map<std::string, std::string>;

// Starts without the variables of one table and puts the environment back afterwards. `Settings` is
// the struct that the table is read into.
template <typename Settings>
class EnvTest : public testing::Test {
 protected:
  void SetUp() override {
    for (const EnvVariable& variable : Settings::variables()) {
      if (const char* value = std::getenv(variable.name)) before_[variable.name] = value;
      unset(variable.name);
    }
  }
  void TearDown() override {
    for (const EnvVariable& variable : Settings::variables()) unset(variable.name);
    for (const auto& [name, value] : before_) set(name, value);
  }
  static void set(const std::string& name, const std::string& value) {
    ::setenv(name.c_str(), value.c_str(), 1);
  }
  static void set(const Values& values) {
    for (const auto& [name, value] : values) set(name, value);
  }
  static void unset(const std::string& name) { ::unsetenv(name.c_str()); }

  // Expects that each variable of the table is in `good`, has a meaning, and changes the settings.
  template <typename AreSame>
  static void expectExactly(const Values& good, AreSame areSame) {
    const auto variables = Settings::variables();
    ASSERT_EQ(variables.size(), good.size());
    const Settings usual = *Settings::read();
    for (const EnvVariable& variable : variables) {
      ASSERT_TRUE(good.contains(variable.name)) << variable.name;
      set(variable.name, good.at(variable.name));
      const auto env = Settings::read();
      ASSERT_TRUE(env.ok()) << env.error().message;
      EXPECT_FALSE(areSame(*env, usual)) << variable.name << " changes nothing";
      unset(variable.name);
      EXPECT_STRNE(variable.meaning, "");
    }
  }

  // Expects that the table's defaults are those of the struct. An empty value is like none.
  template <typename AreSame>
  static void expectDefaults(AreSame areSame) {
    const Settings usual = *Settings::read();
    for (const EnvVariable& variable : Settings::variables())
      set(variable.name, variable.defaultValue);
    const auto env = Settings::read();
    ASSERT_TRUE(env.ok()) << env.error().message;
    EXPECT_TRUE(areSame(*env, usual));
  }

  static void expectRefused(const std::string& name, const std::string& value) {
    set(name, value);
    const auto env = Settings::read();
    unset(name);
    ASSERT_FALSE(env.ok()) << name << "=" << value;
    EXPECT_EQ(env.error().code, ErrorCode::kInvalidArgument);
    for (const std::string& part : {name + "=\"" + value + "\"", std::string("allowed: ")})
      EXPECT_NE(env.error().message.find(part), std::string::npos) << env.error().message;
  }

 private:
  Values before_;
};

}  // namespace mooncake::test
