#include <algorithm>
#include <cerrno>
#include <chrono>
#include <poll.h>

#include "base/descriptors.h"
#include "base/log.h"
#include "engine/engine.h"
#include "engine/route.h"

namespace mooncake {
namespace {

// While connections are made: how long nobody may come of those that have published their address.
constexpr auto kLeastPatience = std::chrono::seconds(1);
constexpr auto kPatiencePerRank = std::chrono::milliseconds(10);

}  // namespace

Result<std::vector<std::shared_ptr<Peer>>> Engine::connect(const std::vector<Bytes>& endpoints,
                                                           Deadline deadline) {
  std::vector<EngineId> ids(endpoints.size());
  for (size_t i = 0; i < endpoints.size(); ++i) {
    auto id = endpointOwner(endpoints[i]);
    if (!id.ok()) return id.error();
    ids[i] = *id;
  }
  {
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < ids.size(); ++i) endpoints_[ids[i]] = endpoints[i];
  }
  auto peers = connectAll(ids, endpoints, deadline);
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < ids.size(); ++i) keepEndpoint(ids[i], endpoints[i]);
  return peers;
}

Result<std::vector<std::shared_ptr<Peer>>> Engine::connectAll(const std::vector<EngineId>& ids,
                                                              const std::vector<Bytes>& endpoints,
                                                              Deadline deadline) {
  size_t strangers = 0;
  {
    std::lock_guard lock(mutex_);
    for (const EngineId& one : ids) strangers += one != id() && !known(one);
  }
  MOONCAKE_TRY(
      checkDescriptors(strangers, "connecting to " + std::to_string(strangers) + " more ranks"));
  // The ranks of a large job learn the addresses one after the other.
  const auto patience = std::max<Clock::duration>(options_.env.failureTimeout, kLeastPatience) +
                        kPatiencePerRank * int64_t(endpoints.size());
  MOONCAKE_TRY(callAll(ids, endpoints, deadline, patience));

  const auto began = Clock::now();
  std::vector<std::shared_ptr<Peer>> peers(endpoints.size());
  std::unique_lock lock(mutex_);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == id()) continue;
    const auto there = [&] { return (peers[i] = known(ids[i])) != nullptr; };
    const std::string name = "rank " + std::to_string(i);
    // Somebody who has published its address calls at once. As long as others still do, all is
    // well.
    Clock::time_point giveUp;
    do {
      const auto quiet = std::max(lastArrival_, began) + patience;
      giveUp = std::min(deadline.when(), quiet);
    } while (!arrived_.wait_until(lock, giveUp, there) && Clock::now() < deadline.when() &&
             std::max(lastArrival_, began) + patience > giveUp);
    if (!peers[i]) {
      return Error{ErrorCode::kTimeout,
                   name +
                       " published its address but did not connect in time: is it alive, and can "
                       "it reach this host?"};
    }
    if (peers[i]->name.empty()) peers[i]->name = name;
  }
  watchSoon();
  return peers;
}

// All calls that are ours to make, many at a time: the peers answer side by side, and whoever
// answers is served at once, so no two engines can wait for each other's turn.
Status Engine::callAll(const std::vector<EngineId>& ids, const std::vector<Bytes>& endpoints,
                       Deadline deadline, Clock::duration patience) {
  struct Call {
    size_t index;
    std::unique_ptr<Connecting> connecting;
  };
  constexpr size_t kMaxCalls = 64;  // of descriptors, and of what a peer must hold for us
  // Peers answer on their loops' threads: whoever waits here for its turn waits for no other rank.
  std::lock_guard calling(callMutex_);
  std::vector<size_t> due;
  // Everybody begins with the next one after itself, so that not all call the same one at once.
  const size_t self = size_t(std::find(ids.begin(), ids.end(), id()) - ids.begin());
  for (size_t step = ids.size(); step >= 1; --step) {
    const size_t i = (self + step) % ids.size();
    std::lock_guard lock(mutex_);
    if (id() < ids[i] && !known(ids[i])) due.push_back(i);
  }
  const auto ends = [this](const EngineId& peer) {
    std::lock_guard lock(mutex_);
    calling_.erase(peer);
    arrived_.notify_all();
  };

  std::vector<Call> calls;
  std::vector<pollfd> sockets;
  const auto failed = [&](size_t index, const Error& why) {
    for (const Call& call : calls) ends(ids[call.index]);
    ends(ids[index]);
    return Status(why.code, "cannot connect to rank " + std::to_string(index) + ": " + why.message);
  };
  while (!due.empty() || !calls.empty()) {
    while (!due.empty() && calls.size() < kMaxCalls) {
      const size_t i = due.back();
      {
        std::lock_guard lock(mutex_);
        // Somebody opens it, or it has opened us: it comes.
        if (known(ids[i]) || isComing(ids[i]) || !calling_.insert(ids[i]).second) {
          due.pop_back();
          continue;
        }
      }
      auto connecting =
          openRoute(transports_, ids[i], endpoints[i], deadline.earlier(Deadline::after(patience)));
      if (!connecting.ok()) return failed(i, connecting.error());
      calls.push_back({i, std::move(*connecting)});
      due.pop_back();
    }
    sockets.clear();
    for (auto call = calls.begin(); call != calls.end();) {
      auto channel = call->connecting->advance();
      if (!channel.ok() && channel.error().code == ErrorCode::kInterrupted) {
        ends(ids[call->index]);  // it has opened us, and comes
        call = calls.erase(call);
        continue;
      }
      if (!channel.ok()) return failed(call->index, channel.error());
      if (!*channel) {
        call->connecting->addSockets(sockets);
        ++call;
        continue;
      }
      log(LogLevel::kInfo, logName(), "connected to rank ", call->index, " over ",
          (*channel)->transportName());
      {
        std::lock_guard lock(mutex_);
        remember(ids[call->index], std::move(*channel), true);
      }
      ends(ids[call->index]);
      call = calls.erase(call);
    }
    if (calls.empty() || (!due.empty() && calls.size() < kMaxCalls)) continue;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline.left()).count();
    if (::poll(sockets.data(), sockets.size(), int(std::min<int64_t>(left, 1000))) < 0 &&
        errno != EINTR)
      return failed(calls.front().index, systemError("poll", errno));
  }
  return {};
}

}  // namespace mooncake
