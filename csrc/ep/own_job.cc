#include "ep/own_job.h"

#include <algorithm>
#include <random>
#include <span>
#include <utility>

#include "ep/layout.h"

namespace mooncake::ep {
namespace {

constexpr size_t kArenaBytes = size_t(4) << 30;  // address space
constexpr size_t kKeyBytes = 32;

Bytes randomKey() {
  std::random_device source;
  Bytes key(kKeyBytes);
  for (std::byte& byte : key) byte = std::byte(source());
  return key;
}

}  // namespace

OwnJob::OwnJob(OwnJobOptions options, EngineEnv env, GroupEnv groupEnv)
    : options_(std::move(options)), env_(std::move(env)), groupEnv_(groupEnv) {
  if (options_.lent) env_.jobKey = options_.lentKey;
  env_.routeHint = options_.routeHint;
  env_.fabricDevices = options_.devices;
  if (!env_.jobKey) proposedKey_ = randomKey();
}

Result<OwnJob> OwnJob::prepare(OwnJobOptions options) {
  auto env = EngineEnv::read();
  if (!env.ok()) return env.error();
  const auto groupEnv = GroupEnv::read();
  if (!groupEnv.ok()) return groupEnv.error();
  return OwnJob(std::move(options), std::move(*env), *groupEnv);
}

Result<std::shared_ptr<Engine>> OwnJob::engineWith(Bytes key) {
  if (options_.lent) return std::move(options_.lent);
  EngineOptions engine{.env = std::move(env_),
                       .logName = "ep rank " + std::to_string(options_.rank),
                       .arenaBytes = std::max(kArenaBytes, 2 * options_.bytes)};
  engine.jobKey = std::move(key);
  return Engine::create(std::move(engine));
}

Result<std::unique_ptr<Group>> OwnJob::begin(Bytes firstProposal, const Group::Exchange& exchange,
                                             Deadline deadline) {
  Bytes key = std::move(firstProposal);
  if (env_.jobKey) {
    const auto own = std::as_bytes(std::span(*env_.jobKey));
    key.assign(own.begin(), own.end());
  }
  auto engine = engineWith(std::move(key));
  if (!engine.ok()) return engine.error();
  return Group::create(std::move(*engine), exchange,
                       {.name = "ep",
                        .rank = options_.rank,
                        .size = options_.size,
                        .env = groupEnv_,
                        .slotBytes = slotBytesFor(options_.size),
                        .mailboxBytes = kMailboxBytes,
                        .raises = options_.raises},
                       deadline);
}

}  // namespace mooncake::ep
