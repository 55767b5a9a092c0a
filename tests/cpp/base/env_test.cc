#include "base/env.h"

#include <chrono>

#include "base/log_env.h"
#include "env_suite.h"

namespace mooncake {
namespace {

struct Settings {
  uint64_t number = 1;
  std::chrono::milliseconds time{3};
  bool flag = false;
  std::vector<std::string> names;
  std::optional<std::string> text;
  std::string key;

  static Result<Settings> read();
  static std::vector<EnvVariable> variables();
};

bool parseKey(std::string_view value, Settings& settings, std::string& allowed) {
  allowed = "8 bytes or more";
  settings.key = value;
  return value.size() >= 8;
}

constexpr EnvEntry<Settings> kTable[] = {
    {{"MOONCAKE_TEST_NUMBER", "1", "a number"}, numberInto<&Settings::number, 1, 64>},
    {{"MOONCAKE_TEST_TIME", "3", "a duration"}, numberInto<&Settings::time, 2, UINT64_MAX>},
    {{"MOONCAKE_TEST_FLAG", "0", "a flag"}, flagInto<&Settings::flag>},
    {{"MOONCAKE_TEST_NAMES", "", "names"}, namesInto<&Settings::names>},
    {{"MOONCAKE_TEST_TEXT", "", "any text"}, textInto<&Settings::text>},
    {{"MOONCAKE_TEST_KEY", "", "a secret"}, parseKey, /*isSecret=*/true},
};

Result<Settings> Settings::read() { return readEnv(kTable); }

std::vector<EnvVariable> Settings::variables() { return variablesOf(kTable); }

bool areSame(const Settings& a, const Settings& b) {
  return a.number == b.number && a.time == b.time && a.flag == b.flag && a.names == b.names &&
         a.text == b.text && a.key == b.key;
}

class EnvTableTest : public test::EnvTest<Settings> {};

const test::Values kGood = {
    {"MOONCAKE_TEST_NUMBER", "64"},   {"MOONCAKE_TEST_TIME", "2"},
    {"MOONCAKE_TEST_FLAG", "1"},      {"MOONCAKE_TEST_NAMES", "a,b"},
    {"MOONCAKE_TEST_TEXT", "a text"}, {"MOONCAKE_TEST_KEY", "secret key"},
};

TEST_F(EnvTableTest, ReadsExactlyItsVariables) { expectExactly(kGood, areSame); }

TEST_F(EnvTableTest, ReadsTheValues) {
  set(kGood);
  const auto settings = Settings::read();
  ASSERT_TRUE(settings.ok()) << settings.error().message;
  EXPECT_EQ(settings->number, 64u);
  EXPECT_EQ(settings->time, std::chrono::milliseconds(2));
  EXPECT_TRUE(settings->flag);
  EXPECT_EQ(settings->names, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(settings->text, "a text");
  EXPECT_EQ(settings->key, "secret key");
}

TEST_F(EnvTableTest, AnEmptyValueIsLikeNone) { expectDefaults(areSame); }

TEST_F(EnvTableTest, ErrorsNameVariableValueAndWhatIsAllowed) {
  for (const char* value : {"0", "65", "-1", "3s", "99999999999999999999999"})
    expectRefused("MOONCAKE_TEST_NUMBER", value);
  expectRefused("MOONCAKE_TEST_TIME", "1");
  expectRefused("MOONCAKE_TEST_FLAG", "yes");
  for (const char* value : {",", "a,", "a,,b"}) expectRefused("MOONCAKE_TEST_NAMES", value);
  set("MOONCAKE_TEST_NUMBER", "65");
  EXPECT_NE(Settings::read().error().message.find("allowed: a whole number from 1 to 64"),
            std::string::npos);
}

TEST_F(EnvTableTest, ASecretStandsInNoMessage) {
  set("MOONCAKE_TEST_KEY", "seven");
  const auto settings = Settings::read();
  ASSERT_FALSE(settings.ok());
  for (const char* part : {"MOONCAKE_TEST_KEY has 5 bytes", "8 bytes or more"})
    EXPECT_NE(settings.error().message.find(part), std::string::npos) << settings.error().message;
  EXPECT_EQ(settings.error().message.find("seven"), std::string::npos);
}

class LogEnvTest : public test::EnvTest<LogEnv> {};

TEST_F(LogEnvTest, ReadsTheLevel) {
  const auto areSame = [](const LogEnv& a, const LogEnv& b) { return a.level == b.level; };
  expectExactly({{"MOONCAKE_LOG_LEVEL", "debug"}}, areSame);
  expectDefaults(areSame);
  expectRefused("MOONCAKE_LOG_LEVEL", "verbose");
  set("MOONCAKE_LOG_LEVEL", "debug");
  EXPECT_EQ(LogEnv::read()->level, LogLevel::kDebug);
}

}  // namespace
}  // namespace mooncake
