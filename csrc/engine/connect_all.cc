#include <algorithm>
#include <cerrno>
#include <chrono>
#include <poll.h>

#include "base/descriptors.h"
#include "base/log.h"
#include "base/mutex.h"
#include "engine/connections.h"
#include "engine/route.h"

namespace mooncake {
namespace {

// If no caller arrives for this long, this rank calls the missing ones itself. In a large job the
// ranks learn the addresses one after the other.
constexpr auto kPatience = std::chrono::seconds(1);
constexpr auto kPatiencePerRank = std::chrono::milliseconds(10);

}  // namespace

Result<std::vector<std::shared_ptr<Peer>>> Connections::connect(const std::vector<Bytes>& endpoints,
                                                                Deadline deadline) {
  std::vector<EngineId> ids(endpoints.size());
  for (size_t i = 0; i < endpoints.size(); ++i) {
    auto id = endpointOwner(endpoints[i]);
    if (!id.ok()) return id.error();
    ids[i] = *id;
  }
  {
    Lock lock(mutex_);
    for (size_t i = 0; i < ids.size(); ++i) endpoints_[ids[i]] = endpoints[i];
  }
  auto peers = connectAll(ids, endpoints, deadline);
  Lock lock(mutex_);
  for (size_t i = 0; i < ids.size(); ++i) keepEndpoint(ids[i], endpoints[i]);
  return peers;
}

Result<std::vector<std::shared_ptr<Peer>>> Connections::connectAll(
    const std::vector<EngineId>& ids, const std::vector<Bytes>& endpoints, Deadline deadline) {
  MOONCAKE_TRY(liveness_.prepare());
  size_t strangers = 0;
  {
    Lock lock(mutex_);
    for (const EngineId& one : ids) strangers += one != options_.id && !known(one);
  }
  MOONCAKE_TRY(
      checkDescriptors(strangers, "connecting to " + std::to_string(strangers) + " more ranks"));
  std::vector<size_t> ours;  // of each pair, the smaller id calls
  for (size_t i = 0; i < ids.size(); ++i) {
    if (options_.id < ids[i]) ours.push_back(i);
  }
  MOONCAKE_TRY(callAll(ids, endpoints, std::move(ours), deadline));
  // A late rank may still be waiting for the store, but its I/O thread answers our call all the
  // same. A dead rank refuses the call, so we do not wait for the deadline.
  const auto patience = kPatience + kPatiencePerRank * int64_t(endpoints.size());
  for (auto missing = awaitCallers(ids, deadline, patience); !missing.empty();
       missing = awaitCallers(ids, deadline, patience)) {
    if (deadline.passed()) {
      return Error{ErrorCode::kTimeout,
                   "rank " + std::to_string(missing.front()) +
                       " published its address but did not connect in time: is it alive, and can "
                       "it reach this host?"};
    }
    MOONCAKE_TRY(callAll(ids, endpoints, std::move(missing), deadline));
  }

  std::vector<std::shared_ptr<Peer>> peers(endpoints.size());
  Lock lock(mutex_);
  for (size_t i = 0; i < ids.size(); ++i) {
    if (ids[i] == options_.id) continue;
    peers[i] = known(ids[i]);
    if (peers[i]->name.empty()) peers[i]->name = "rank " + std::to_string(i);
  }
  return peers;
}

// Waits until all are connected, the deadline passes, or none has arrived for `patience`. Returns
// the indices of the missing ones.
std::vector<size_t> Connections::awaitCallers(const std::vector<EngineId>& ids, Deadline deadline,
                                              Clock::duration patience) {
  const auto began = Clock::now();
  size_t next = 0;  // all before it are connected
  Lock lock(mutex_);
  const auto isThere = [&](size_t i)
                           REQUIRES(mutex_) { return ids[i] == options_.id || known(ids[i]); };
  const auto allThere = [&]() REQUIRES(mutex_) {
    while (next < ids.size() && isThere(next)) ++next;
    return next == ids.size();
  };
  Clock::time_point until;
  do {
    until = std::min(deadline.when(), std::max(lastArrival_, began) + patience);
  } while (!arrived_.wait_until(mutex_, until, allThere) && !deadline.passed() &&
           std::max(lastArrival_, began) + patience > until);
  std::vector<size_t> missing;
  for (size_t i = next; i < ids.size(); ++i) {
    if (!isThere(i)) missing.push_back(i);
  }
  return missing;
}

// Calls the unconnected ones of `wanted`, many at a time. Peers answer in parallel, and an answer
// is handled at once, so two engines never wait for each other's turn.
Status Connections::callAll(const std::vector<EngineId>& ids, const std::vector<Bytes>& endpoints,
                            std::vector<size_t> wanted, Deadline deadline) {
  struct Call {
    size_t index;
    std::unique_ptr<Connecting> connecting;
  };
  constexpr size_t kMaxCalls = 64;  // bounds descriptors here and memory at the peers
  // Peers answer on their loops' threads, so a thread that waits for this lock blocks no other
  // rank.
  Lock calling(callMutex_);
  std::erase_if(wanted, [&](size_t i) {
    Lock lock(mutex_);
    return known(ids[i]) != nullptr;
  });
  // Each rank begins with its successor, so that not all ranks call the same one at once.
  const size_t self = size_t(std::find(ids.begin(), ids.end(), options_.id) - ids.begin());
  const auto first = std::ranges::lower_bound(wanted, self);
  std::rotate(wanted.begin(), first, wanted.end());
  std::vector<size_t> due(wanted.rbegin(), wanted.rend());
  const auto ends = [this](const EngineId& peer) {
    Lock lock(mutex_);
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
        Lock lock(mutex_);
        // Another thread calls the peer, or the peer has called us: its channel is coming.
        if (known(ids[i]) || isComing(ids[i]) || !calling_.insert(ids[i]).second) {
          due.pop_back();
          continue;
        }
      }
      auto connecting = openRoute(transports_, ids[i], endpoints[i], deadline);
      if (!connecting.ok()) return failed(i, connecting.error());
      calls.push_back({i, std::move(*connecting)});
      due.pop_back();
    }
    sockets.clear();
    for (auto call = calls.begin(); call != calls.end();) {
      auto channel = call->connecting->advance();
      if (!channel.ok() && channel.error().code == ErrorCode::kInterrupted) {
        ends(ids[call->index]);  // the peer has called us, and its channel is coming
        call = calls.erase(call);
        continue;
      }
      if (!channel.ok()) return failed(call->index, channel.error());
      if (!*channel) {
        call->connecting->addSockets(sockets);
        ++call;
        continue;
      }
      log(LogLevel::kInfo, options_.logName, "connected to rank ", call->index, " over ",
          (*channel)->transportName());
      {
        Lock lock(mutex_);
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
