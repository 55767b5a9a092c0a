#include "group/group_env.h"

namespace mooncake {
namespace {

constexpr EnvEntry<GroupEnv> kTable[] = {
    {{"MOONCAKE_EAGER_BYTES", "0", "Eager limit in bytes; 0 = automatic"},
     numberInto<&GroupEnv::eagerBytes, 0, uint64_t(1) << 30>},
};

}  // namespace

Result<GroupEnv> GroupEnv::read() { return readEnv(kTable); }

std::vector<EnvVariable> GroupEnv::variables() { return variablesOf(kTable); }

}  // namespace mooncake
