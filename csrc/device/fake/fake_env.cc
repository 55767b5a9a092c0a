#include "device/fake/fake_env.h"

namespace mooncake {
namespace {

constexpr EnvEntry<FakeEnv> kTable[] = {
    {{"FAKE_QUEUES", "8",
      "Hardware queues that the streams of a fake device share, for tests. 0: each stream has one"},
     numberInto<&FakeEnv::queues, 0, 1024>},
};

}  // namespace

Result<FakeEnv> FakeEnv::read() { return readEnv(kTable); }

}  // namespace mooncake
