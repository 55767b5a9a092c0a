#include "membership/membership.h"

#include <algorithm>
#include <future>
#include <utility>

#include "base/backoff.h"
#include "base/crypto.h"
#include "base/log.h"
#include "base/rank_list.h"
#include "membership/loss_waits.h"
#include "membership/words.h"

namespace mooncake {
namespace {

using std::chrono::milliseconds;

// An accusation is held back for longer than two detectors differ and a report takes.
ViewAgreement::Timing timingFor(milliseconds failureTimeout) {
  return {.grace = std::clamp(failureTimeout / 60, milliseconds(20), milliseconds(50)),
          .resend = std::clamp(failureTimeout / 10, milliseconds(50), milliseconds(500))};
}

// Longest time for which goodbyes are collected, unless the job is so large that the first pause is
// longer.
constexpr Clock::duration kMostGoodbyePause = milliseconds(250);

// Reason in the goodbye of a rank that is over, for peers that still count it as a member.
constexpr const char* kGaveUp = "it took itself to be on the smaller side and gave up";

}  // namespace

Result<std::shared_ptr<Membership>> Membership::start(std::shared_ptr<Engine> engine,
                                                      Options options) {
  const auto size = static_cast<int>(options.peers.size());
  if (size > JobRanks::kLimit) {
    return Error{ErrorCode::kUnsupported, "a job has " + std::to_string(JobRanks::kLimit) +
                                              " ranks at most, not " + std::to_string(size)};
  }
  for (int rank = 0; rank < size; ++rank) {
    if ((options.peers[size_t(rank)] == nullptr) != (rank == options.rank)) {
      return Error{
          ErrorCode::kInvalidArgument,
          "in the list of peers just the entry of this rank must be null: wrong for rank " +
              std::to_string(rank) + " of " + std::to_string(size)};
    }
  }
  std::shared_ptr<Membership> membership(new Membership(std::move(engine), std::move(options)));
  Membership* self = membership.get();  // the destructor removes the handlers
  // Before the topic opens: a reply to a message may be lost with its connection.
  self->engine_->observe([self](const std::vector<EngineId>& peers,
                                const Evidence& evidence) { self->onEvidence(peers, evidence); },
                         [self](const EngineId& peer) { self->onReconnected(peer); });
  self->engine_->openTopic(kMembershipTopic, [self](const EngineId& from, ByteView message) {
    self->onMessage(from, message);
  });
  return membership;
}

Membership::Membership(std::shared_ptr<Engine> engine, Options options)
    : engine_(std::move(engine)),
      options_(std::move(options)),
      agreement_(options_.rank, {1, JobRanks::firstRanks(size())},
                 timingFor(options_.failureTimeout)),
      held_(timingFor(options_.failureTimeout).resend),
      view_(agreement_.view()) {
  for (int rank = 0; rank < size(); ++rank) {
    if (const auto& there = peer(rank)) ranks_[there->id] = rank;
  }
}

Membership::~Membership() {
  engine_->closeTopic(kMembershipTopic);
  engine_->observe(nullptr);
  runOnLoop([this] {
    isStopped_ = true;
    engine_->loop().cancel(timer_);
  });
  runOnLoop([] {});  // waits for tasks that were posted earlier
}

// Returns when the task has run.
void Membership::runOnLoop(std::function<void()> task) {
  const auto done = std::make_shared<std::promise<void>>();
  engine_->loop().post([task = std::move(task), done] {
    task();
    done->set_value();
  });
  done->get_future().wait();
}

void Membership::subscribe(Listener* listener) {
  runOnLoop([this, listener] {
    listeners_.push_back(listener);
    if (agreement_.view().epoch > 1) listener->onView(agreement_.view());
    if (const Status now = standing(); !now.ok()) listener->onOver(now.error());
  });
}

void Membership::unsubscribe(Listener* listener) {
  runOnLoop([this, listener] { std::erase(listeners_, listener); });
}

Result<std::pair<uint64_t, uint64_t>> Membership::newTopics(const std::string& group,
                                                            const std::vector<int>& ranks) {
  const auto crypto = Crypto::load();
  if (!crypto.ok()) return crypto.error();
  std::string identity = group;
  for (const int rank : ranks) identity += "/" + std::to_string(rank);
  uint64_t count;
  {
    Lock lock(mutex_);
    count = ++groupsMade_[identity];
  }
  identity += "#" + std::to_string(count);
  const Mac digest = (*crypto)->hmac(std::as_bytes(std::span(std::string_view("topics"))),
                                     std::as_bytes(std::span(identity)));
  ByteReader in(digest);
  const auto first = in.get<uint64_t>();
  return std::pair(first, in.get<uint64_t>());
}

View Membership::view() const {
  Lock lock(mutex_);
  return view_;
}

Status Membership::standing() const {
  Lock lock(mutex_);
  return standing_;
}

std::vector<Membership::Seen> Membership::seen() const {
  Lock lock(mutex_);
  std::vector<Seen> all;
  for (const auto& [rank, one] : seen_) all.push_back(one);
  return all;
}

std::vector<Accusation> Membership::accusations() const {
  Lock lock(mutex_);
  std::vector<Accusation> all;
  for (const auto& [rank, one] : seen_) {
    if (!isGoodbye(one.accusation.cause)) all.push_back(one.accusation);
  }
  return all;
}

bool Membership::isLost(int rank) const {
  Lock lock(mutex_);
  const auto found = seen_.find(rank);
  return found == seen_.end() || found->second.accusation.cause != Cause::kLeft;
}

void Membership::missed(const JobRanks& ranks) {
  JobRanks ended;
  JobRanks gaveUp;
  View view;
  {
    Lock lock(mutex_);
    (ranks - missed_).forEach([&](int rank) {
      mutex_.assertHeld();
      const auto found = seen_.find(rank);
      if (found == seen_.end() || found->second.accusation.cause != Cause::kEnded) return;
      (found->second.detail == kGaveUp ? gaveUp : ended).add(rank);
    });
    missed_ |= ended;
    missed_ |= gaveUp;
    view = view_;
  }
  if (!ended.empty()) {
    log(LogLevel::kWarning, engine_->logName(), listOf(ended),
        " ended without destroy_process_group() while ", ended.count() == 1 ? "its" : "their",
        " job still runs operations", whoContinues(view));
  }
  if (!gaveUp.empty()) {
    log(LogLevel::kWarning, engine_->logName(), listOf(gaveUp), " lost (", kGaveUp, ")",
        whoContinues(view));
  }
}

void Membership::heldUp(const JobRanks& ranks, Clock::time_point called) const {
  const auto now = Clock::now();
  std::vector<LossWait> waits;
  {
    Lock lock(mutex_);
    ranks.forEach([&](int rank) {
      mutex_.assertHeld();
      const auto found = seen_.find(rank);
      // A rank that left only the group is still in the view; a goodbye is no loss.
      if (view_.active.contains(rank) || found == seen_.end()) return;
      if (found->second.accusation.cause == Cause::kLeft) return;
      waits.push_back({rank, now - std::max(called, found->second.since)});
    });
  }
  const Status noted = noteWaits(options_.waitsFile, waits);
  if (!noted.ok()) log(LogLevel::kInfo, engine_->logName(), noted.error().message);
}

// ---- on the loop's thread

void Membership::onEvidence(const std::vector<EngineId>& peers, const Evidence& evidence) {
  JobRanks ranks;
  for (const EngineId& id : peers) {
    if (const auto found = ranks_.find(id); found != ranks_.end()) ranks.add(found->second);
  }
  if (holdGoodbye(ranks, evidence)) return armTimer();
  takeGoodbyes();  // came first
  ranks.forEach([&](int rank) { evidence_[rank] = evidence; });
  judge(ranks, evidence);
  takeHeld();
}

// Each judgement of a goodbye is a report to all ranks, and at the end of a job all ranks say
// goodbye. So the goodbyes that follow another one soon wait for a pause, which doubles while they
// go on coming.
bool Membership::holdGoodbye(const JobRanks& ranks, const Evidence& evidence) {
  if (!evidence.isGoodbye() && evidence.kind != Evidence::Kind::kEnded) return false;
  const auto now = Clock::now();
  if (now < goodbyesHeldUntil_ || hasLeft_.load(std::memory_order_acquire)) {
    goodbyes_.emplace_back(ranks, evidence);
    return true;
  }
  const auto first = pauseFor(size());
  const bool isAlone = now >= goodbyesHeldUntil_ + goodbyePause_;
  goodbyePause_ = isAlone ? first : doubled(goodbyePause_, std::max(first, kMostGoodbyePause));
  goodbyesHeldUntil_ = now + jittered(goodbyePause_);
  return false;
}

// A rank that has left itself has no use for them.
void Membership::takeGoodbyes() {
  if (hasLeft_.load(std::memory_order_acquire)) goodbyes_.clear();
  for (const auto& [ranks, evidence] : std::exchange(goodbyes_, {})) {
    ranks.forEach([&, &how = evidence](int rank) { evidence_[rank] = how; });
    judge(ranks, evidence);
  }
}

void Membership::holdGoodbyes(Clock::time_point until) {
  engine_->loop().post([this, until] { goodbyesHeldUntil_ = std::max(goodbyesHeldUntil_, until); });
}

void Membership::judge(const JobRanks& ranks, const Evidence& evidence) {
  const auto now = Clock::now();
  switch (evidence.kind) {
    case Evidence::Kind::kExited:
      return ranks.forEach([&](int rank) { onExited(rank); });
    case Evidence::Kind::kGoodbye:
      return ranks.forEach([&](int rank) { onLeft(rank, Cause::kLeft); });
    case Evidence::Kind::kEnded:
      return ranks.forEach([&](int rank) { onLeft(rank, Cause::kEnded); });
    case Evidence::Kind::kFailed:
      return ranks.forEach([&](int rank) { onFailed(rank); });
    case Evidence::Kind::kSilent:
      return act(agreement_.suspected(ranks, Cause::kSilent, now));
    case Evidence::Kind::kRefused:
      return act(agreement_.suspected(ranks, Cause::kRefused, now));
    case Evidence::Kind::kUnreachable:
      return act(agreement_.suspected(ranks, Cause::kUnreachable, now));
  }
}

// The agreement resends an undecided report when its time comes. This sends it at once, and also a
// decided one: only the peer could know whether it got that.
void Membership::onReconnected(const EngineId& id) {
  const auto found = ranks_.find(id);
  if (found == ranks_.end()) return;
  ViewActions again;
  again.sendTo.add(found->second);
  act(again);
  for (Listener* listener : listeners_) listener->onReconnected(found->second);
}

// The kernel has ended the process by now, so its crash report is final.
void Membership::onExited(int rank) {
  const auto last = readLastReport(rank) ? ViewAgreement::LastReport::kReceived
                                         : ViewAgreement::LastReport::kUnknown;
  act(agreement_.exited({rank}, last, Clock::now()));
}

// Its last report came before the goodbye; on our host its crash report says the same.
void Membership::onLeft(int rank, Cause cause) {
  (void)readLastReport(rank);
  act(agreement_.left(rank, Clock::now(), cause));
}

// As certain as an exit, and its last report is known as after a goodbye.
void Membership::onFailed(int rank) {
  (void)readLastReport(rank);
  act(agreement_.exited({rank}, ViewAgreement::LastReport::kReceived, Clock::now()));
}

bool Membership::readLastReport(int rank) {
  const auto words = peer(rank)->lastReport();
  if (!words) return false;
  if (words->empty()) return true;  // the rank never had anything to report
  const auto report = decodeViewReport(*words, size());
  if (!report.ok() || report->from != rank) return false;
  act(agreement_.received(*report, Clock::now()));
  return true;
}

void Membership::onMessage(const EngineId& from, ByteView message) {
  const auto sender = ranks_.find(from);
  if (sender == ranks_.end()) return;
  const auto report = decodeViewReport(message, size());
  if (!report.ok() || report->from != sender->second) {
    log(LogLevel::kWarning, engine_->logName(), "a report of rank ", sender->second,
        " is dropped: ", report.ok() ? "it speaks for another rank" : report.error().message);
    return;
  }
  const auto now = Clock::now();
  const bool evictsUs = report->committed.contains(options_.rank);
  if (!evictsUs && held_.keep(*report, knownOut(), now)) return armTimer();
  act(agreement_.received(*report, now));
}

// Ranks from which no goodbye is expected any more.
JobRanks Membership::knownOut() const {
  JobRanks known = agreement_.report().out() | JobRanks{options_.rank};
  for (const auto& [rank, evidence] : evidence_) known.add(rank);
  return known;
}

void Membership::takeHeld() {
  const auto now = Clock::now();
  for (const ViewReport& report : held_.take(knownOut(), now))
    act(agreement_.received(report, now));
}

void Membership::act(const ViewActions& actions) {
  publish();  // before any action that follows from it
  for (const Accusation& accusation : actions.accused) note(accusation);
  if (actions.commit) commit(*actions.commit);
  if (actions.evicted) end(evictedBy(*actions.evicted));
  if (actions.minority) end(inMinority());
  sendTo_ |= actions.sendTo;
  // One send serves all events of this round of the loop.
  if (!sendTo_.empty() && !isSending_ && !isStopped_) {
    isSending_ = true;
    engine_->loop().post([this] { sendReports(); });
  }
  armTimer();
}

void Membership::publish() {
  const ViewReport& report = agreement_.report();
  if (report.out().empty()) return;
  Bytes bytes = encodeViewReport(report);
  if (bytes == published_) return;
  const Status written = engine_->publish(kMembershipTopic, bytes);
  if (!written.ok())
    log(LogLevel::kError, engine_->logName(),
        "the last report cannot be published: ", written.error().message);
  published_ = std::move(bytes);
}

void Membership::sendReports() {
  isSending_ = false;
  const JobRanks to = std::exchange(sendTo_, {});
  if (published_.empty()) return;
  to.forEach([&](int rank) {
    if (rank == options_.rank) return;
    const Status sent = engine_->send(*peer(rank), kMembershipTopic, published_);  // [send]
    // Sent again later if it matters. The end of the peer is reported as evidence.
    if (sent.code() == ErrorCode::kExhausted)
      log(LogLevel::kWarning, engine_->logName(), "a report is late: ", sent.error().message);
  });
}

void Membership::note(const Accusation& accusation) {
  const auto [rank, cause, by] = accusation;
  Seen seen{accusation, {}, std::chrono::system_clock::now(), Clock::now()};
  if (const auto ours = evidence_.find(rank); ours != evidence_.end()) {
    seen.since = std::min(seen.since, ours->second.when);
    if (by == options_.rank) seen.detail = ours->second.detail;
  }
  if (cause == Cause::kSilent) seen.since -= options_.failureTimeout;
  if (!isGoodbye(cause)) {
    log(LogLevel::kInfo, engine_->logName(), "rank ", rank, " is accused by rank ", by, ": ",
        nameOf(cause), seen.detail.empty() ? "" : ": ", seen.detail);
  }
  Lock lock(mutex_);
  // A suspicion may have become certain.
  if (const auto before = seen_.find(rank); before != seen_.end())
    seen.since = std::min(seen.since, before->second.since);
  seen_[rank] = std::move(seen);
}

// The reason for the log: "died (process exited)".
std::string Membership::reasonOf(int rank) const {
  const std::vector<Accusation>& causes = agreement_.report().accusations;
  const auto why = std::find_if(causes.begin(), causes.end(),
                                [&](const Accusation& one) { return one.rank == rank; });
  if (why == causes.end()) return "lost";
  const auto ours = evidence_.find(rank);
  switch (why->cause) {
    case Cause::kExited:
      if (ours != evidence_.end() && ours->second.kind == Evidence::Kind::kFailed)
        return "died (" + ours->second.detail + ")";
      return "died (process exited)";
    case Cause::kLeft:
      return "left";
    case Cause::kEnded:
      return "ended";
    case Cause::kSilent:
      return "lost (silent for " + std::to_string(options_.failureTimeout.count()) + " ms)";
    case Cause::kRefused:
      return "lost (connection broken, nobody listens there any more)";
    case Cause::kUnreachable:
      return "lost (connection broken)";
    case Cause::kExcludes:
      return "lost (goes on without rank " + std::to_string(why->by) + ")";
  }
  return "lost";
}

// "ranks 1, 2 died (process exited), rank 3 left".
std::string Membership::describe(const JobRanks& ranks) const {
  RankTexts reasons;
  ranks.forEach([&](int rank) { reasons.add(rank, reasonOf(rank)); });
  return reasons.join(", ", [](const std::vector<int>& alike, const std::string& reason) {
    return nameRanks(alike) + " " + reason;
  });
}

void Membership::commit(const View& view) {
  JobRanks out;
  bool isLoss = false;
  {
    Lock lock(mutex_);
    out = view_.active - view.active;
    view_ = view;
    out.forEach([&](int rank) {
      mutex_.assertHeld();
      const auto found = seen_.find(rank);
      isLoss = isLoss || found == seen_.end() || !isGoodbye(found->second.accusation.cause);
    });
  }
  out.forEach([&](int rank) { peer(rank)->channel->beginFence(); });
  out.forEach([&](int rank) { peer(rank)->channel->fence(); });
  log(isLoss ? LogLevel::kWarning : LogLevel::kInfo, engine_->logName(), describe(out),
      whoContinues(view));
  for (Listener* listener : listeners_) listener->onView(view);
}

Error Membership::evictedBy(const ViewActions::Eviction& eviction) const {
  const auto& [rank, cause, by] = eviction.why;
  return {ErrorCode::kEvicted,
          "invalid state: this rank is not active: the job goes on without rank " +
              std::to_string(rank) + " in epoch " + std::to_string(eviction.epoch) + ", as rank " +
              std::to_string(eviction.toldBy) + " said and we learned at " + nowInWords() +
              "; rank " + std::to_string(by) + " accused it: " + nameOf(cause)};
}

Error Membership::inMinority() const {
  JobRanks lost;
  RankTexts causes;
  {
    Lock lock(mutex_);
    for (const auto& [rank, one] : seen_) {
      if (!view_.active.contains(rank)) continue;
      lost.add(rank);
      causes.add(rank, nameOf(one.accusation.cause));
    }
  }
  const auto phrase = [](const std::vector<int>& ranks, const std::string& cause) {
    return nameRanks(ranks) + " (" + cause + ")";
  };
  return {ErrorCode::kMinority,
          "too few ranks are left on this side to go on: of " + listOf(agreement_.view().active) +
              " of epoch " + std::to_string(agreement_.view().epoch) + " we have lost " +
              causes.join(", ", phrase) + ", which may go on without us; since " + nowInWords()};
}

void Membership::end(const Error& why) {
  {
    Lock lock(mutex_);
    if (!standing_.ok() || hasLeft_.load(std::memory_order_acquire)) return;
    standing_ = why;
  }
  isOver_.store(true, std::memory_order_release);
  log(LogLevel::kError, engine_->logName(), why.message);
  for (Listener* listener : listeners_) listener->onOver(why);
  // Says goodbye, so that no rank waits for us. We have destroyed nothing, so a rank that goes on
  // and needs us has lost us. Posted, because a channel may be the caller of this function.
  engine_->loop().post([this] {
    if (!isStopped_) engine_->leave({Farewell::How::kEnded, kGaveUp});
  });
}

void Membership::armTimer() {
  auto next = isStopped_ ? std::nullopt : agreement_.nextTick();
  if (const auto until = isStopped_ ? std::nullopt : held_.nextTick())
    next = next ? std::min(*next, *until) : until;
  if (!isStopped_ && !goodbyes_.empty())
    next = next ? std::min(*next, goodbyesHeldUntil_) : goodbyesHeldUntil_;
  if (next == timerAt_) return;
  engine_->loop().cancel(timer_);
  timerAt_ = next;
  if (!next) return;
  timer_ = engine_->loop().runAt(Deadline::at(*next), [this] {
    timerAt_.reset();
    if (Clock::now() >= goodbyesHeldUntil_) takeGoodbyes();
    takeHeld();
    act(agreement_.tick(Clock::now()));
  });
}

}  // namespace mooncake
