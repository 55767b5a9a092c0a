#include "group/group_env.h"

#include "env_suite.h"
#include "membership/membership_env.h"

namespace mooncake {
namespace {

class GroupEnvTest : public test::EnvTest<GroupEnv> {};

TEST_F(GroupEnvTest, ReadsTheEagerLimit) {
  const auto areSame = [](const GroupEnv& a, const GroupEnv& b) {
    return a.eagerBytes == b.eagerBytes;
  };
  expectExactly({{"MOONCAKE_EAGER_BYTES", "4096"}}, areSame);
  expectDefaults(areSame);
  expectRefused("MOONCAKE_EAGER_BYTES", "99999999999999999999999");
  set("MOONCAKE_EAGER_BYTES", "4096");
  EXPECT_EQ(GroupEnv::read()->eagerBytes, 4096u);
}

class MembershipEnvTest : public test::EnvTest<MembershipEnv> {};

TEST_F(MembershipEnvTest, FindsTheFileForWaits) {
  const auto areSame = [](const MembershipEnv& a, const MembershipEnv& b) {
    return a.waitsFile == b.waitsFile;
  };
  expectExactly({{"TORCHELASTIC_ERROR_FILE", "/logs/2/error.json"}}, areSame);
  expectDefaults(areSame);
  set("TORCHELASTIC_ERROR_FILE", "/logs/2/error.json");
  EXPECT_EQ(MembershipEnv::read()->waitsFile, "/logs/2/waits.txt");
}

}  // namespace
}  // namespace mooncake
