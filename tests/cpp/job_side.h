#pragma once

#include <chrono>
#include <gtest/gtest.h>
#include <memory>
#include <string>

#include "engine/engine.h"
#include "membership/join_options.h"

namespace mooncake::testing {

// Engines of one job, which processes may join.
inline const JobIdentity kJob{.job = "the job", .mode = "continue", .options = 7};

inline std::shared_ptr<Engine> makeJobEngine(const std::string& wire, const std::string& name,
                                             std::chrono::milliseconds failureTimeout) {
  EngineOptions options{.logName = name, .arenaBytes = size_t(1) << 30};
  options.env.transports = {wire};
  options.env.hostIp = "127.0.0.1";
  options.env.failureTimeout = failureTimeout;
  options.jobKey = Bytes(32, std::byte{7});
  auto made = Engine::create(std::move(options));
  EXPECT_TRUE(made.ok()) << made.error().message;
  return made.ok() ? *made : nullptr;
}

}  // namespace mooncake::testing
