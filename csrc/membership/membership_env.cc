#include "membership/membership_env.h"

#include <string_view>

namespace mooncake {
namespace {

bool parseErrorFile(std::string_view value, MembershipEnv& env, std::string&) {
  const size_t slash = value.rfind('/');
  if (slash != std::string_view::npos)
    env.waitsFile = std::string(value.substr(0, slash + 1)) + "waits.txt";
  return true;
}

constexpr EnvEntry<MembershipEnv> kTable[] = {
    {{"TORCHELASTIC_ERROR_FILE", "",
      "Set by launchers; in its folder mooncake-run's ranks note how long losses held them up"},
     parseErrorFile},
};

}  // namespace

Result<MembershipEnv> MembershipEnv::read() { return readEnv(kTable); }

std::vector<EnvVariable> MembershipEnv::variables() { return variablesOf(kTable); }

}  // namespace mooncake
