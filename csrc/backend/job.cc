#include "backend/job.h"

#include <string>
#include <utility>

#include "backend/arguments.h"
#include "backend/c10d_store.h"
#include "backend/errors.h"
#include "base/crypto.h"
#include "base/failpoint.h"
#include "base/hash.h"
#include "base/log.h"
#include "engine/rendezvous/address_book.h"
#include "engine/rendezvous/generation.h"
#include "membership/membership_env.h"

namespace mooncake {
namespace {

// Rank 0 may live on, and its store, too: they are not waited for longer than this.
constexpr auto kRankZeroEnds = std::chrono::milliseconds(200);
constexpr auto kStoreEnds = std::chrono::milliseconds(50);
// An attempt to join a job lasts so many failure timeouts and a moment: longer than its patience with
// a rank that is held.
constexpr int kJoinAgain = 3;
constexpr std::chrono::seconds kMoment(2);
constexpr size_t kAloneKeyBytes = 16;  // of an engine without peers
// For the store's answer to a process that comes back: the store may be gone.
constexpr std::chrono::seconds kStoreAnswers(1);

std::vector<Bytes> endpointsIn(const std::vector<Bytes>& published) {
  std::vector<Bytes> endpoints;
  for (const Bytes& one : published) endpoints.push_back(orThrow(Group::endpointIn(one)));
  return endpoints;
}

}  // namespace

Job::Job(int rank, int size, const BackendOptions& options)
    : rank_(rank),
      size_(size),
      env_(options.env),
      lent_(options.engine),
      launcherKey_(options.launcherKey),
      token_(options.joinToken),
      mergeMembers_(options.mergeMembers) {}

std::shared_ptr<Engine> Job::engine() const {
  Lock lock(placeMutex_);
  return engine_;
}

std::shared_ptr<Membership> Job::membership() const {
  Lock lock(placeMutex_);
  return membership_;
}

std::shared_ptr<Engine> Job::makeEngine() const {
  EngineOptions options{.env = env_, .logName = "rank " + std::to_string(rank_)};
  options.env.routeHint = routeHint_;
  options.jobKey = key_;
  return orThrow(Engine::create(std::move(options)));
}

std::unique_ptr<Group> Job::begin(const c10::intrusive_ptr<c10d::Store>& store,
                                  const GroupOptions& options, Deadline deadline) {
  if (rank_ != 0) rankZeroStore_ = store;
  routeHint_ = rendezvousHost(store);
  C10dStore plain(store, deadline, launcherKey_);
  const MergeStore::Members members = std::exchange(mergeMembers_, nullptr);
  MergeStore merging(plain, rank_, size_, members);
  Store& shared = members ? static_cast<Store&>(merging) : plain;
  for (;;) {
    const auto joined = Generation::join(shared, rank_, env_.jobKey, deadline);
    if (!joined.ok()) throwError(plain.explain(joined.error()));
    Generation* const generation = joined->get();
    // An engine of an earlier generation has ended before the next one is made.
    key_ = generation->jobKey();
    const std::shared_ptr<Engine> engine = lent_ ? lent_ : makeEngine();
    GroupOptions first = options;
    first.founders = size_;
    id_ = generation->id();
    first.identity = identity_ = identityOf(options);
    auto group = Group::create(engine, *generation, std::move(first), deadline);
    if (group.ok()) {
      Lock lock(placeMutex_);
      engine_ = engine;
      membership_ = (*group)->membership();
      return std::move(*group);
    }
    const Error error = plain.explain(group.error());
    // kInterrupted: no rank is in this generation any more, and another one comes. Any other error
    // does not matter if a successor has come, which is then its cause.
    if (error.code == ErrorCode::kInterrupted) {
      const Status successor = generation->awaitSuccessor(deadline);
      if (!successor.ok()) throwError(plain.explain(successor.error()));
    } else if (!generation->hasSuccessor()) {
      // The goodbye tells the cause to the other ranks, even if the store is gone. An engine that
      // the caller lent to this job stays.
      if (!lent_) {
        engine->leave({Farewell::How::kFailed, "it could not make the group: " + error.message});
      }
      // A rank that never joined the group cannot be lost.
      if (error.code == ErrorCode::kPeerLost) throwError({ErrorCode::kRefused, error.message});
      throwError(error);
    }
  }
}

JobIdentity Job::identityOf(const GroupOptions& group) const {
  return {.job = id_,
          .mode = group.raises ? "raise" : "continue",
          .options = fnv1a({group.env.eagerBytes, group.mailboxBytes})};
}

bool Job::isRunning(const c10::intrusive_ptr<c10d::Store>& store, Deadline deadline) const {
  C10dStore shared(store, deadline, "");
  const auto generation = Generation::find(shared, rank_, env_.jobKey, deadline);
  return generation.ok() && mooncake::published(**generation, Group::kPublished, deadline).ok();
}

std::unique_ptr<Group> Job::join(const c10::intrusive_ptr<c10d::Store>& store,
                                 const GroupOptions& options, Deadline deadline) {
  std::unique_ptr<Generation> generation;  // null: the token tells
  JoinToken token;
  // The launcher's notices name the rank that this process replaces.
  C10dStore shared(store, deadline, "");
  routeHint_ = rendezvousHost(store);
  if (token_.empty()) {
    if (rank_ != 0) rankZeroStore_ = store;
    auto found = Generation::find(shared, rank_, env_.jobKey, deadline);
    if (!found.ok()) throwError(shared.explain(found.error()));
    generation = std::move(*found);
    id_ = generation->id();
    key_ = generation->jobKey();
  } else {
    auto given = decodeJoinToken(token_);
    if (!given.ok())
      throwError({ErrorCode::kInvalidArgument,
                  "rank " + std::to_string(rank_) + ": " + given.error().message});
    token = std::move(*given);
    checkKey("a join token");
    id_ = token.job;
    const ByteView own = std::as_bytes(std::span(*env_.jobKey));
    key_.assign(own.begin(), own.end());
  }
  identity_ = identityOf(options);
  throwIfError(enter(
      size_,
      [&] {
        if (!generation) return token.members;
        const auto published = mooncake::published(*generation, Group::kPublished, deadline);
        if (!published.ok()) throwError(shared.explain(published.error()));
        return endpointsIn(*published);
      },
      deadline));
  // Later processes may find no founding member. Without the store, they find none of us either.
  if (generation) (void)publishLater(*generation, Group::kPublished, Group::publishedBy(*engine()));
  GroupOptions alone = options;
  alone.size = membership()->size();
  return makeAlone(std::move(alone), deadline);
}

// `size`: number of ranks of which this process knows. `members` is asked before each attempt.
Status Job::enter(int size, const FindMembers& members, Deadline deadline) {
  const auto env = MembershipEnv::read();
  if (!env.ok()) return env.error();
  std::optional<Clock::time_point> aloneSince;  // no member has been reached since then
  for (;;) {
    const JoinOptions asked{.identity = identity_,
                            .members = members(),
                            .rank = rank_,
                            .size = size,
                            .failureTimeout = env_.failureTimeout,
                            .waitsFile = env->waitsFile};
    const std::shared_ptr<Engine> engine = lent_ ? lent_ : makeEngine();
    // Members die meanwhile, and other processes come: then a new engine asks again.
    const Deadline attempt =
        deadline.earlier(Deadline::after(kJoinAgain * env_.failureTimeout + kMoment));
    auto joined = Membership::join(engine, asked, attempt);
    if (joined.ok()) {
      failpoint("joined");
      {
        Lock lock(placeMutex_);
        if (!hasLeft_) {
          engine_ = engine;
          membership_ = std::move(*joined);
          return {};
        }
      }
      // Another thread has destroyed the group meanwhile.
      (*joined)->leave();
      engine->leave({});
      return {ErrorCode::kAborted, "the process group was destroyed"};
    }
    const ErrorCode why = joined.error().code;
    // It may have been let in, and be out again: this process was stopped meanwhile.
    const bool mayPass = why == ErrorCode::kTimeout || why == ErrorCode::kPeerLost ||
                         why == ErrorCode::kInterrupted || why == ErrorCode::kEvicted ||
                         why == ErrorCode::kMinority;
    const auto now = Clock::now();
    if (why != ErrorCode::kPeerLost) aloneSince.reset();
    if (why == ErrorCode::kPeerLost && !aloneSince) aloneSince = now;
    const bool isOver = aloneSince && now - *aloneSince > 2 * env_.failureTimeout;
    if (!mayPass || lent_ || isOver || deadline.passed()) return joined.error();
    log(LogLevel::kInfo, engine->logName(), joined.error().message, "; it asks again");
  }
}

void Job::enterAgain(Deadline deadline) {
  Lock lock(enteringMutex_);
  if (hasLeft_) throwError({ErrorCode::kAborted, "the process group was destroyed"});
  const auto before = membership();
  if (before->standing().ok()) return;
  if (lent_)
    throwError({ErrorCode::kUnsupported,
                "rank " + std::to_string(rank_) +
                    ": the job went on without this process, and its engine was made by the "
                    "program: only a new process can take its place"});
  std::vector<Bytes> known;
  for (int rank = 0; rank < before->size(); ++rank) {
    const auto peer = before->peer(rank);
    Bytes endpoint = peer ? before->engine().endpointOf(*peer) : Bytes();
    if (!endpoint.empty()) known.push_back(std::move(endpoint));
  }
  const Status entered = enter(
      before->size(), [&] { return known; }, deadline);
  if (!entered.ok())
    throwError(
        {ErrorCode::kRefused, "rank " + std::to_string(rank_) +
                                  " cannot come back into the job: " + entered.error().message});
  publishPlace(Deadline::after(kStoreAnswers));
}

// All members that this process knew may have come back themselves, with other engines. None: the
// store is gone or does not answer, or this is rank 0.
std::vector<Bytes> Job::publishedMembers(Deadline deadline) const {
  if (!rankZeroStore_) return {};
  C10dStore shared(rankZeroStore_, deadline, "");
  const auto generation = Generation::find(shared, rank_, env_.jobKey, deadline);
  if (!generation.ok() || (*generation)->id() != id_) return {};
  const auto published = mooncake::published(**generation, Group::kPublished, deadline);
  return published.ok() ? endpointsIn(*published) : std::vector<Bytes>();
}

// Later processes may find no other member.
void Job::publishPlace(Deadline deadline) const {
  if (!rankZeroStore_) return;
  C10dStore shared(rankZeroStore_, deadline, "");
  const auto generation = Generation::find(shared, rank_, env_.jobKey, deadline);
  if (generation.ok() && (*generation)->id() == id_)
    (void)publishLater(**generation, Group::kPublished, Group::publishedBy(*engine()));
}

void Job::checkKey(const char* what) const {
  if (env_.jobKey) return;
  throwError(
      {ErrorCode::kInvalidArgument,
       "rank " + std::to_string(rank_) + ": " + what +
           " holds no secret, so MOONCAKE_JOB_KEY must be set to the job's key, on all ranks "
           "from the beginning"});
}

JoinToken Job::joinToken() const {
  checkKey("a join token");
  const auto membership = this->membership();
  throwIfError(membership->standing());
  JoinToken token{.job = id_};
  const std::vector<Bytes> endpoints = endpointsOf(*membership);
  for (size_t i = 0; i < endpoints.size() && token.members.size() < JoinToken::kMostMembers; ++i) {
    const Bytes& next = endpoints[(size_t(membership->rank()) + i) % endpoints.size()];
    if (!next.empty()) token.members.push_back(next);
  }
  return token;
}

std::unique_ptr<Group> Job::makeAlone(GroupOptions options, Deadline deadline) {
  return orThrow(tryMakeAlone(std::move(options), deadline));
}

Result<std::unique_ptr<Group>> Job::tryMakeAlone(GroupOptions options, Deadline deadline) {
  std::shared_ptr<Membership> alone;
  {
    Lock lock(aloneMutex_);
    if (!alone_) {
      EngineOptions own{.env = env_, .logName = engine()->logName()};
      own.env.transports = {"inproc"};
      const std::string key = Crypto::randomHex(kAloneKeyBytes);
      const ByteView bytes = std::as_bytes(std::span(key));
      own.jobKey.assign(bytes.begin(), bytes.end());
      auto engine = Engine::create(std::move(own));
      if (!engine.ok()) return engine.error();
      auto made = Membership::start(
          std::move(*engine),
          {.rank = rank_,
           .peers = std::vector<std::shared_ptr<Peer>>(size_t(membership()->size()))});
      if (!made.ok()) return made.error();
      alone_ = std::move(*made);
    }
    alone = alone_;
  }
  return Group::createWithin(std::move(alone), std::move(options), deadline);
}

// A rank that is out of the job makes no groups.
std::unique_ptr<Group> Job::makeGroup(const Group& parent, GroupOptions options,
                                      Deadline deadline) const {
  if (hasLeft_) throwError({ErrorCode::kAborted, "the process group was destroyed"});
  const auto membership = this->membership();
  throwIfError(membership->standing());
  return orThrow(Group::createWithin(membership, std::move(options), deadline, parent.roster()));
}

void Job::add(const void* group, std::function<void(Farewell::How)> leave) {
  Lock lock(mutex_);
  moveHead(nullptr, group);
  groups_.emplace_back(group, std::move(leave));
}

void Job::moveHead(const void* from, const void* to) { head_.compare_exchange_strong(from, to); }

void Job::remove(const void* group) {
  Lock lock(mutex_);
  std::erase_if(groups_, [&](const auto& one) { return one.first == group; });
  moveHead(group, this);  // no group has its address any more
}

void Job::leaveOthers(const void* group, Farewell::How how) {
  Lock lock(mutex_);
  for (const auto& [other, leave] : groups_) {
    if (other != group) leave(how);
  }
}

std::string Job::nameLine(const std::string& group, int firstRank, int room) {
  const std::string name =
      "line " + group + "/" + std::to_string(firstRank) + "/" + std::to_string(room);
  Lock lock(linesMutex_);
  for (int number = 1;; ++number) {
    const auto [place, isNew] = lines_.insert(name + "#" + std::to_string(number));
    if (isNew) return *place;
  }
}

void Job::freeLine(const std::string& name) {
  Lock lock(linesMutex_);
  lines_.erase(name);
}

void Job::awaitRankZerosExit(const Group& group) const {
  if (!rankZeroStore_) return;
  Waiter waiter = group.waiter(Deadline::after(kRankZeroEnds));
  const auto isGone = [&] { return group.window().disconnection(0) != nullptr; };
  while (waiter.until(isGone) == WaitResult::kInterrupted)
    waiter.generation = waiter.interrupt.generation();
  if (isGone()) awaitServersEnd(rankZeroStore_, Deadline::after(kStoreEnds));
}

void Job::sayGoodbye(const Farewell& farewell) {
  std::shared_ptr<Engine> engine;
  std::shared_ptr<Membership> membership;
  {
    Lock lock(placeMutex_);
    hasLeft_ = true;
    engine = engine_;
    membership = membership_;
  }
  if (membership) membership->leave();
  if (!lent_ || farewell.how != Farewell::How::kDestroyed) return engine->leave(farewell);
  // The lent engine's owner opens a peer again to which it transfers.
  const Deadline budget = Deadline::after(env_.failureTimeout);
  for (int rank = 0; membership && rank < membership->size(); ++rank) {
    const auto peer = membership->peer(rank);
    if (!peer) continue;
    const Status forgotten = engine->forget(peer, budget);
    if (!forgotten.ok()) log(LogLevel::kInfo, engine->logName(), forgotten.error().message);
  }
}

}  // namespace mooncake
