#include "backend/backend_env.h"

#include <string>
#include <string_view>

namespace mooncake {
namespace {

bool parseOnFailure(std::string_view value, BackendEnv& env, std::string& allowed) {
  allowed = "continue or raise";
  env.raises = value == "raise";
  return value == "continue" || value == "raise";
}

constexpr EnvEntry<BackendEnv> kTable[] = {
    {{"MOONCAKE_ON_FAILURE", "continue",
      "What a loss does to the operation that it interrupts: continue or raise"},
     parseOnFailure},
};

}  // namespace

Result<BackendEnv> BackendEnv::read() { return readEnv(kTable); }

}  // namespace mooncake
