#include "membership/admission.h"

#include <algorithm>
#include <utility>

#include "base/failpoint.h"
#include "base/log.h"
#include "engine/route.h"
#include "membership/membership.h"
#include "membership/words.h"

namespace mooncake {

std::optional<int> Admission::rankOf(const EngineId& candidate) const {
  const auto found = candidates_.find(candidate);
  return found == candidates_.end() ? std::nullopt : std::optional(found->second);
}

// A process joins by its own report, too, once it has said CONNECTED to us.
std::optional<int> Admission::expects(const EngineId& id) {
  const JoinRequest* request = desk_.find(id);
  if (!request || !request->connected) return std::nullopt;
  const int number = job_.agreement_.enlist(request->rank, id);
  if (number < 0) return std::nullopt;
  candidates_[id] = request->rank;
  return number;
}

void Admission::await(const EngineId& newcomer) {
  unmet_.emplace(newcomer, Clock::now() + job_.options_.failureTimeout / 10);
}

void Admission::hasEntered(const EngineId& newcomer) {
  candidates_.erase(newcomer);
  desk_.remove(newcomer);
}

void Admission::hasEnded(const EngineId& id) {
  const bool hasAsked = desk_.find(id) != nullptr;
  desk_.remove(id);
  const auto there = hasAsked && !candidates_.contains(id) ? job_.engine_->find(id) : nullptr;
  if (there && there->disconnected) job_.engine_->forgetSoon(there);
}

std::string Admission::describe(const EngineId& newcomer) const {
  const JoinRequest* request = desk_.find(newcomer);
  if (!request) return "another process";
  return "pid " + std::to_string(request->process) + " on " + request->host;
}

std::optional<Clock::time_point> Admission::nextTick() const {
  auto next = desk_.nextTick();
  const auto look = Clock::now() + kLookForPeers;
  if (!unmet_.empty()) next = next ? std::min(*next, look) : look;
  return next;
}

void Admission::onMessage(const EngineId& from, ByteView message) {
  if (job_.isStopped_) return;
  auto decoded = decodeJoinMessage(message);
  if (decoded.ok()) {
    auto* request = std::get_if<JoinRequest>(&*decoded);
    if (request && !job_.ranks_.contains(from)) return onRequest(from, std::move(*request));
    if (request && request->connected) isHere(from, *request);
    if (const auto* meeting = std::get_if<JoinMeeting>(&*decoded))
      keepEndpoint(from, meeting->rank, meeting->endpoint);
    return;
  }
  if (job_.ranks_.contains(from)) return;
  log(LogLevel::kInfo, job_.engine_->logName(),
      "a candidate is refused: ", decoded.error().message);
  if (decoded.error().code == ErrorCode::kMismatch) {
    (void)job_.engine_->send(
        from, kJoinTopic,
        encodeJoinMessage(JoinRefusal{JoinRefusal::Reason::kVersion, decoded.error().message}));
  }
}

void Admission::onRequest(const EngineId& from, JoinRequest request) {
  const View view = job_.view();
  if (auto refusal =
          desk_.take(from, request,
                     {.view = view,
                      .isOver = job_.isOver() || job_.hasLeft_.load(std::memory_order_acquire),
                      .isFormer = isFormer(from),
                      .time = Clock::now()})) {
    if (!refusal->isForNow())
      log(LogLevel::kInfo, job_.engine_->logName(), "pid ", request.process, " on ", request.host,
          " is refused: ", refusal->text);
    (void)job_.engine_->send(from, kJoinTopic, encodeJoinMessage(*refusal));
    return;
  }
  job_.armTimer();
  keepEndpoint(from, request.rank, request.endpoint);
  if (!request.connected) return sendRoster(from);
  const bool isUpToDate = request.connected->term == job_.agreement_.report().term &&
                          request.connected->epoch == view.epoch;
  const auto number = job_.numberOf(from);
  const bool hasJoined = number && job_.agreement_.joins().contains(*number);
  if (hasJoined) {
    introduce(from, request);
    job_.sendTo_.insert(from);  // it may have lost our report
    return job_.act({});
  }
  if (!isUpToDate) return sendRoster(from);
  if (!job_.agreement_.mayAdmit(request.rank)) return;  // another candidate is before it
  failpoint("admit");
  candidates_[from] = request.rank;
  introduce(from, request);
  job_.act(job_.agreement_.admit(request.rank, from, Clock::now()));
}

// It has become a rank before its own words came, by the reports of other members. It may not have
// heard of that yet: a candidate that has begun anew has lost what it had heard.
void Admission::isHere(const EngineId& from, const JoinRequest& request) {
  keepEndpoint(from, request.rank, request.endpoint);
  introduce(from, request);
  job_.sendTo_.insert(from);
  job_.act({});
}

// A newcomer tells its endpoint to each process that it has called. The next newcomers need it.
void Admission::keepEndpoint(const EngineId& from, int rank, const Bytes& endpoint) {
  const auto owner = endpointOwner(endpoint);
  if (owner.ok() && *owner == from)
    job_.engine_->keepEndpoint(from, endpoint, "rank " + std::to_string(rank));
}

void Admission::sendRoster(const EngineId& to) {
  const auto roster = job_.roster();
  const View view = job_.view();
  const std::vector<Bytes> endpoints = endpointsOf(job_);
  JobRanks unknown;
  view.active.forEach([&](int rank) {
    if (endpoints[size_t(rank)].empty()) unknown.add(rank);
  });
  if (!unknown.empty()) {
    const JoinRefusal later{JoinRefusal::Reason::kBusy,
                            listOf(unknown) + " came in a moment ago: ask again"};
    (void)job_.engine_->send(to, kJoinTopic, encodeJoinMessage(later));
    return;
  }
  for (const RosterPart& part : splitRoster(roster->term, view, endpoints))
    (void)job_.engine_->send(to, kJoinTopic, encodeJoinMessage(part));
}

// Tells this newcomer and the processes to which it may have no connection of each other: candidates,
// and ranks that entered after the term that it knows.
void Admission::introduce(const EngineId& newcomer, const JoinRequest& request) {
  const auto tell = [&](const EngineId& id, int rank) {
    const Bytes endpoint = job_.engine_->endpointOf(id);
    if (id == newcomer || endpoint.empty()) return;
    (void)job_.engine_->send(id, kJoinTopic,
                             encodeJoinMessage(JoinMeeting{request.rank, request.endpoint}));
    (void)job_.engine_->send(newcomer, kJoinTopic, encodeJoinMessage(JoinMeeting{rank, endpoint}));
  };
  (job_.agreement_.joins() - job_.agreement_.out()).forEach([&](int number) {
    tell(job_.agreement_.idOf(number), job_.agreement_.rankOf(number));
  });
  if (!request.connected) return;
  const auto roster = job_.roster();
  for (int rank = 0; rank < job_.size(); ++rank) {
    const auto& holder = roster->term.holders[size_t(rank)];
    if (holder && holder->since > request.connected->term.number) tell(holder->id, rank);
  }
}

// Notes the candidates of which reports have told us. Forgets those that are out for good.
void Admission::meet() {
  job_.agreement_.joins().forEach([&](int number) {
    const EngineId& id = job_.agreement_.idOf(number);
    if (id == job_.engine_->id()) return;
    const JoinRequest* request = desk_.find(id);
    if (candidates_.emplace(id, job_.agreement_.rankOf(number)).second && request)
      introduce(id, *request);
    if (job_.agreement_.out().contains(number)) return;
    const auto there = job_.engine_->find(id);
    if (!there || there->disconnected)
      unmet_.emplace(id, Clock::now() + job_.options_.failureTimeout / 10);
  });
  for (auto one = candidates_.begin(); one != candidates_.end();) {
    const EngineId id = one->first;
    if (job_.agreement_.numberOf(id, one->second)) {
      ++one;
      continue;
    }
    one = candidates_.erase(one);  // the term was closed, and it is no rank of the next one
    former_.insert(id);
    desk_.remove(id);
    job_.evidence_.erase(id);
    if (const auto there = job_.engine_->find(id)) job_.toForget_.push_back(there);
  }
}

void Admission::look() {
  const auto now = Clock::now();
  (void)desk_.removeSilent(now);  // it may ask again, so its connection stays
  JobRanks unreachable;
  std::erase_if(unmet_, [&](const auto& entry) {
    const auto number = job_.numberOf(entry.first);
    if (!number) return true;
    if (const auto there = job_.engine_->find(entry.first); there && !there->disconnected) {
      if (*number < job_.size()) job_.addPeer(*number, there);
      return true;
    }
    if (now < entry.second) return false;
    unreachable.add(*number);
    return true;
  });
  if (!unreachable.empty())
    job_.act(job_.agreement_.suspected(unreachable, Cause::kUnreachable, now));
}

}  // namespace mooncake
