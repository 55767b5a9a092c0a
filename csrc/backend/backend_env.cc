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
    {{"MOONCAKE_STREAM_WORDS", "0",
      "1: wait() for tensors of a device makes the stream wait, and not the host"},
     flagInto<&BackendEnv::streamWords>},
};

}  // namespace

Result<BackendEnv> BackendEnv::read() { return readEnv(kTable); }

}  // namespace mooncake
