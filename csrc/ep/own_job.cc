#include "ep/own_job.h"

#include <algorithm>
#include <optional>
#include <random>
#include <span>
#include <utility>

#include "engine/env.h"
#include "ep/layout.h"
#include "group/group_env.h"

namespace mooncake::ep {
namespace {

constexpr size_t kKeyBytes = 32;

Bytes randomKey() {
  std::random_device source;
  Bytes key(kKeyBytes);
  for (std::byte& byte : key) byte = std::byte(source());
  return key;
}

// Bytes in an exchange, wire form:  u8 ErrorCode | what the rank tells, or the text of its error.
// Returns the first rank's error, if a rank has one.
Result<std::vector<Bytes>> exchangeResults(const ByteExchange& exchange,
                                           const Result<Bytes>& mine) {
  ByteWriter out;
  out.put(static_cast<uint8_t>(mine.status().code()));
  if (mine.ok()) {
    out.putRaw(*mine);
  } else {
    out.putRaw(std::as_bytes(std::span(mine.error().message)));
  }
  auto all = exchange(out.take());
  if (!all.ok()) return all;
  for (size_t r = 0; r < all->size(); ++r) {
    ByteReader in((*all)[r]);
    const auto code = in.get<uint8_t>();
    const ByteView told = in.getRaw(in.left());
    if (code == 0) {
      (*all)[r] = Bytes(told.begin(), told.end());
      continue;
    }
    std::string text = "rank " + std::to_string(r) + " could not make its Buffer: ";
    for (const std::byte character : told) text += char(character);
    const bool isKnown = code <= static_cast<uint8_t>(kLastErrorCode);
    return Error{isKnown ? ErrorCode(code) : ErrorCode::kProtocol, std::move(text)};
  }
  return all;
}

struct Env {
  EngineEnv engine;
  GroupEnv group;
};

Result<Env> readEnv(const OwnJobOptions& options) {
  MOONCAKE_TRY(options.ready);
  auto engine = EngineEnv::read();
  if (!engine.ok()) return engine.error();
  const auto group = GroupEnv::read();
  if (!group.ok()) return group.error();
  if (options.lent) engine->jobKey = options.lentKey;
  engine->routeHint = options.routeHint;
  engine->fabricDevices = options.devices;
  return Env{std::move(*engine), *group};
}

// The key that this rank proposes. Empty: it has a key, from the environment or the lent engine.
Result<Bytes> proposalOf(const Result<Env>& env) {
  if (!env.ok()) return env.error();
  return env->engine.jobKey ? Bytes() : randomKey();
}

Result<std::shared_ptr<Engine>> makeEngine(const OwnJobOptions& options, EngineEnv env,
                                           Bytes proposedKey) {
  if (options.lent) return options.lent;
  EngineOptions engine{.env = std::move(env),
                       .jobKey = std::move(proposedKey),
                       .logName = "ep rank " + std::to_string(options.rank),
                       .arenaBytes = std::max(usualArenaBytes(), 2 * options.bytes)};
  if (const auto& own = engine.env.jobKey) {
    const auto key = std::as_bytes(std::span(*own));
    engine.jobKey.assign(key.begin(), key.end());
  }
  return Engine::create(std::move(engine));
}

GroupOptions groupOptions(const OwnJobOptions& options, const GroupEnv& env) {
  return {.name = "ep",
          .rank = options.rank,
          .size = options.size,
          .env = env,
          .slotBytes = slotBytesFor(options.size),
          .pushBytes = kPushBytes,
          .raises = options.raises};
}

}  // namespace

Result<std::unique_ptr<Group>> beginOwnJob(const OwnJobOptions& options,
                                           const ByteExchange& exchange, Deadline deadline) {
  auto env = readEnv(options);
  auto proposals = exchangeResults(exchange, proposalOf(env));
  if (!proposals.ok()) return proposals.error();
  Bytes key = proposals->empty() ? Bytes() : std::move(proposals->front());
  auto engine = makeEngine(options, std::move(env->engine), std::move(key));
  const auto meet = [&](const Result<Bytes>& mine) { return exchangeResults(exchange, mine); };
  if (!engine.ok()) {
    const auto told = meet(engine.error());
    return told.ok() ? engine.error() : told.error();
  }
  return Group::create(std::move(*engine), meet, groupOptions(options, env->group), deadline);
}

Result<std::unique_ptr<Group>> groupWithin(const Group& first, const OwnJobOptions& options,
                                           Deadline deadline) {
  return Group::createWithin(first.membership(), groupOptions(options, first.env()), deadline);
}

}  // namespace mooncake::ep
