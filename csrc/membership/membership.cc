#include "membership/membership.h"

#include <algorithm>
#include <future>
#include <utility>

#include "base/backoff.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "base/rank_list.h"
#include "membership/candidacy.h"
#include "membership/loss_waits.h"
#include "membership/topics.h"
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

// What a process can do without which the job goes on.
constexpr const char* kComesBack = ". It comes back with join_group, or ends";

// A rank without a peer is this process itself, or out: then the first view is not that of all ranks,
// and groups hear of it.
std::shared_ptr<const Roster> firstRoster(const EngineId& self,
                                          const Membership::Options& options) {
  auto roster = std::make_shared<Roster>();
  roster->peers = options.peers;
  for (const auto& peer : options.peers) {
    auto& holder = roster->term.holders.emplace_back();
    if (peer) holder = Holder{peer->id};
  }
  roster->term.holders[size_t(options.rank)] = Holder{self};
  const int founders = options.founders > 0 ? options.founders : roster->size();
  if (roster->term.active().count() < founders) roster->term.epoch = 2;
  return roster;
}

}  // namespace

Result<std::shared_ptr<Membership>> Membership::start(std::shared_ptr<Engine> engine,
                                                      Options options) {
  const auto size = static_cast<int>(options.peers.size());
  if (size > JobRanks::kLimit) {
    return Error{ErrorCode::kUnsupported, "a job has " + std::to_string(JobRanks::kLimit) +
                                              " ranks at most, not " + std::to_string(size)};
  }
  if (options.rank < 0 || options.rank >= size || options.peers[size_t(options.rank)]) {
    return Error{ErrorCode::kInvalidArgument,
                 "in the list of peers the entry of this rank must be null: wrong for rank " +
                     std::to_string(options.rank) + " of " + std::to_string(size)};
  }
  auto roster = firstRoster(engine->id(), options);
  options.peers.clear();
  std::shared_ptr<Membership> membership(
      new Membership(std::move(engine), std::move(options), std::move(roster), false));
  membership->open();
  return membership;
}

Result<std::shared_ptr<Membership>> Membership::join(std::shared_ptr<Engine> engine,
                                                     JoinOptions options, Deadline deadline,
                                                     const StopSignal* stop) {
  if (options.members.empty() || options.rank < 0 || options.rank >= options.size ||
      options.size > JobRanks::kLimit) {
    return Error{ErrorCode::kInvalidArgument,
                 "joining a job needs the address of a member, and a rank below the size"};
  }
  Result<std::shared_ptr<Membership>> membership =
      Candidacy(engine, std::move(options), deadline, stop).run();
  if (!membership.ok()) {
    engine->leave({Farewell::How::kFailed, "it could not join the job"});
    return membership;
  }
  (*membership)->serveJoins();
  engine->startSilenceDetection();
  const Status noted = noteJoined((*membership)->options_.waitsFile);
  if (!noted.ok()) log(LogLevel::kInfo, engine->logName(), noted.error().message);
  const View view = (*membership)->view();
  log(LogLevel::kInfo, engine->logName(), "joined the job as rank ", (*membership)->rank(),
      whoContinues(view));
  return membership;
}

Membership::Membership(std::shared_ptr<Engine> engine, Options options,
                       std::shared_ptr<const Roster> roster, bool isCandidate)
    : engine_(std::move(engine)),
      options_(std::move(options)),
      size_(roster->size()),
      agreement_(ViewAgreement::Options{
          .id = engine_->id(),
          .term = roster->term,
          .asksFor = isCandidate ? std::optional(options_.rank) : std::nullopt,
          .timing = timingFor(options_.failureTimeout),
          .admits = options_.identity.has_value()}),
      held_(timingFor(options_.failureTimeout).resend),
      admission_(*this, {.identity = options_.identity,
                         .size = size_,
                         .patience = Clock::duration(options_.failureTimeout)}),
      roster_(std::move(roster)),
      view_(agreement_.view()) {
  for (int rank = 0; rank < size(); ++rank) {
    if (const auto there = peer(rank)) ranks_[there->id] = rank;
  }
}

// The destructor removes the handlers. The observer comes before the topics open, because a reply to
// a message may be lost with its connection.
void Membership::open() {
  engine_->observe([this](const std::vector<EngineId>& peers,
                          const Evidence& evidence) { onEvidence(peers, evidence); },
                   [this](const EngineId& peer) { onReconnected(peer); });
  engine_->openTopic(kMembershipTopic,
                     [this](const EngineId& from, ByteView message) { onMessage(from, message); });
  if (!agreement_.isCandidate()) serveJoins();
}

void Membership::serveJoins() {
  servesJoins_ = true;
  engine_->openTopic(kJoinTopic, [this](const EngineId& from, ByteView message) {
    admission_.onMessage(from, message);
  });
}

Membership::~Membership() {
  engine_->closeTopic(kMembershipTopic);
  if (servesJoins_) engine_->closeTopic(kJoinTopic);
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

void Membership::subscribe(Listener* listener, std::shared_ptr<const Roster> roster, bool always) {
  runOnLoop([this, listener, roster = std::move(roster), always] {
    listeners_.push_back({listener, roster});
    const View now = roster ? viewOf(*roster) : view();
    if (always || now.epoch > 1 || now.active.count() < size()) listener->onView(now);
    if (const Status now = standing(); !now.ok()) listener->onOver(now.error());
  });
}

std::vector<Bytes> endpointsOf(const Membership& job) {
  std::vector<Bytes> endpoints{size_t(job.size())};
  const Engine& engine = job.engine();
  const auto roster = job.roster();
  job.viewOf(*roster).active.forEach([&](int rank) {
    const EngineId& id = roster->term.holders[size_t(rank)]->id;
    endpoints[size_t(rank)] = id == engine.id() ? engine.endpoint() : engine.endpointOf(id);
  });
  return endpoints;
}

Result<std::pair<uint64_t, uint64_t>> Membership::newTopics(const std::string& group,
                                                            const std::vector<int>& ranks) {
  std::string identity = group;
  for (const int rank : ranks) identity += "/" + std::to_string(rank);
  uint64_t count;
  {
    Lock lock(mutex_);
    count = ++groupsMade_[identity];
  }
  return topicsOf(identity + "#" + std::to_string(count));
}

View Membership::viewFor(const Roster& roster) const {
  View view{view_.epoch, {}};
  view_.active.forEach([&](int rank) {
    mutex_.assertHeld();
    if (roster_->term.hasSameHolder(roster.term, rank)) view.active.add(rank);
  });
  return view;
}

const Membership::Seen* Membership::seenOf(const Roster& roster, int rank) const {
  const auto& holder = roster.term.holders[size_t(rank)];
  const auto found = holder ? seen_.find(holder->id) : seen_.end();
  return found == seen_.end() ? nullptr : &found->second;
}

std::vector<Membership::Seen> Membership::seen(const Roster& roster) const {
  Lock lock(mutex_);
  std::vector<Seen> all;
  for (int rank = 0; rank < roster.size(); ++rank) {
    if (const Seen* one = seenOf(roster, rank)) all.push_back(*one);
  }
  return all;
}

std::vector<Accusation> Membership::accusations() const {
  std::vector<Accusation> all;
  for (const Seen& one : seen()) {
    if (!isGoodbye(one.accusation.cause)) all.push_back(one.accusation);
  }
  return all;
}

void Membership::missed(const Roster& roster, const JobRanks& ranks) {
  JobRanks ended;
  JobRanks gaveUp;
  View view;
  {
    Lock lock(mutex_);
    ranks.forEach([&](int rank) {
      mutex_.assertHeld();
      const Seen* seen = seenOf(roster, rank);
      if (!seen || seen->accusation.cause != Cause::kEnded) return;
      if (!missed_.insert(roster.term.holders[size_t(rank)]->id).second) return;
      (seen->detail == kGaveUp ? gaveUp : ended).add(rank);
    });
    view = viewFor(roster);
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

void Membership::heldUp(const Roster& roster, const JobRanks& ranks,
                        Clock::time_point called) const {
  const auto now = Clock::now();
  std::vector<LossWait> waits;
  {
    Lock lock(mutex_);
    const View view = viewFor(roster);
    ranks.forEach([&](int rank) {
      mutex_.assertHeld();
      const Seen* seen = seenOf(roster, rank);
      // A rank that left only the group is still in the view; a goodbye is no loss.
      if (view.active.contains(rank) || !seen) return;
      if (seen->accusation.cause == Cause::kLeft) return;
      waits.push_back({rank, now - std::max(called, seen->since)});
    });
  }
  const Status noted = noteWaits(options_.waitsFile, waits);
  if (!noted.ok()) log(LogLevel::kInfo, engine_->logName(), noted.error().message);
}

// ---- on the loop's thread

std::optional<int> Membership::numberOf(const EngineId& id) const {
  if (const auto found = ranks_.find(id); found != ranks_.end()) return found->second;
  const auto rank = admission_.rankOf(id);
  return rank ? agreement_.numberOf(id, *rank) : std::nullopt;
}

void Membership::onEvidence(const std::vector<EngineId>& peers, const Evidence& evidence) {
  if (isStopped_) return;
  if (holdGoodbye(peers, evidence)) return armTimer();
  takeGoodbyes();  // came first
  judge(peers, evidence);
  takeHeld();
}

// Each judgement of a goodbye is a report to all ranks, and at the end of a job all ranks say
// goodbye. So the goodbyes that follow another one soon wait for a pause, which doubles while they
// go on coming.
bool Membership::holdGoodbye(const std::vector<EngineId>& peers, const Evidence& evidence) {
  if (!evidence.isGoodbye() && evidence.kind != Evidence::Kind::kEnded) return false;
  const auto now = Clock::now();
  if (now < goodbyesHeldUntil_ || hasLeft_.load(std::memory_order_acquire)) {
    goodbyes_.emplace_back(peers, evidence);
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
  for (const auto& [peers, evidence] : std::exchange(goodbyes_, {})) judge(peers, evidence);
}

void Membership::judge(const std::vector<EngineId>& peers, const Evidence& evidence) {
  JobRanks numbers;
  for (const EngineId& id : peers) {
    if (const auto number = numberOf(id)) numbers.add(*number);
    // Kept for a candidate, too: its members are judged once it takes part.
    if (ranks_.contains(id) || admission_.rankOf(id)) evidence_[id] = evidence;
    admission_.hasEnded(id);
  }
  const auto each = [&](auto judgeOne) {
    for (const EngineId& id : peers) {
      if (const auto number = numberOf(id)) judgeOne(*number, id);
    }
  };
  const auto now = Clock::now();
  switch (evidence.kind) {
    case Evidence::Kind::kExited:
      return each([&](int number, const EngineId& id) { onExited(number, id); });
    case Evidence::Kind::kGoodbye:
      return each([&](int number, const EngineId& id) { onLeft(number, id, Cause::kLeft); });
    case Evidence::Kind::kEnded:
      return each([&](int number, const EngineId& id) { onLeft(number, id, Cause::kEnded); });
    case Evidence::Kind::kFailed:
      return each([&](int number, const EngineId& id) { onFailed(number, id); });
    case Evidence::Kind::kSilent:
      return act(agreement_.suspected(numbers, Cause::kSilent, now));
    case Evidence::Kind::kRefused:
      return act(agreement_.suspected(numbers, Cause::kRefused, now));
    case Evidence::Kind::kUnreachable:
      return act(agreement_.suspected(numbers, Cause::kUnreachable, now));
  }
}

// The agreement resends an undecided report when its time comes. This sends it at once, and also a
// decided one: only the peer could know whether it got that.
void Membership::onReconnected(const EngineId& id) {
  const auto number = numberOf(id);
  if (!number || isStopped_) return;
  ViewActions again;
  again.sendTo.add(*number);
  act(again);
  for (const auto& [listener, roster] : listeners_) {
    if (*number < size() && (!roster || roster->term.rankOf(id))) listener->onReconnected(*number);
  }
}

// The kernel has ended the process by now, so its crash report is final. Reading that may close the
// term, after which the process has another number, or none.
void Membership::onExited(int number, const EngineId& id) {
  const auto last = readLastReport(number, id) ? ViewAgreement::LastReport::kReceived
                                               : ViewAgreement::LastReport::kUnknown;
  if (const auto now = numberOf(id)) act(agreement_.exited({*now}, last, Clock::now()));
}

// Its last report came before the goodbye; on our host its crash report says the same.
void Membership::onLeft(int number, const EngineId& id, Cause cause) {
  (void)readLastReport(number, id);
  if (const auto now = numberOf(id)) act(agreement_.left(*now, Clock::now(), cause));
}

// As certain as an exit, and its last report is known as after a goodbye.
void Membership::onFailed(int number, const EngineId& id) {
  (void)readLastReport(number, id);
  if (const auto now = numberOf(id))
    act(agreement_.exited({*now}, ViewAgreement::LastReport::kReceived, Clock::now()));
}

bool Membership::readLastReport(int number, const EngineId& id) {
  const auto there = number < size() ? peer(number) : engine_->find(id);
  const auto words = there ? there->lastReport() : std::nullopt;
  if (!words) return false;
  if (words->empty()) return true;  // the rank never had anything to report
  auto report = decodeViewReport(*words, size());
  if (!report.ok() || report->from != agreement_.rankOf(number)) return false;
  report->from = number;
  act(agreement_.received(*report, Clock::now()));
  return true;
}

void Membership::onMessage(const EngineId& from, ByteView message) {
  if (isStopped_) return;
  auto number = numberOf(from);
  if (!number && admission_.isFormer(from)) {  // it hears why it is out
    sendTo_.insert(from);
    return act({});
  }
  if (!number) number = admission_.expects(from);
  if (!number) return;
  auto report = decodeViewReport(message, size());
  if (!report.ok() || report->from != agreement_.rankOf(*number)) {
    log(LogLevel::kWarning, engine_->logName(), "a report of rank ", agreement_.rankOf(*number),
        " is dropped: ", report.ok() ? "it speaks for another rank" : report.error().message);
    return;
  }
  report->from = *number;
  const auto now = Clock::now();
  // Reports of other terms mean other processes by their ranks.
  const bool mayWait = report->term == agreement_.report().term && *number < size() &&
                       !report->committed.contains(options_.rank) && agreement_.takesPart();
  if (mayWait && held_.keep(*report, knownOut(), now)) return armTimer();
  const bool tookPart = agreement_.takesPart();
  act(agreement_.received(*report, now));
  if (tookPart || !agreement_.takesPart()) return;
  // Ends of members that were seen before count from now on.
  for (const auto& [id, evidence] : std::map(evidence_)) judge({id}, evidence);
}

JobRanks Membership::knownOut() const {
  JobRanks known = agreement_.report().out() | JobRanks{options_.rank};
  for (const auto& [id, evidence] : evidence_) {
    if (const auto rank = ranks_.find(id); rank != ranks_.end()) known.add(rank->second);
  }
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
  for (const ViewActions::NextTerm& next : actions.next) {
    enter(next);
    for (const Accusation& accusation : next.accused) note(accusation);
  }
  if (actions.commit && *actions.commit != view()) commit(*actions.commit);
  if (actions.evicted) end(evictedBy(*actions.evicted));
  if (actions.minority) end(inMinority());
  admission_.meet();
  actions.sendTo.forEach([&](int number) { sendTo_.insert(agreement_.idOf(number)); });
  // One send serves all events of this round of the loop.
  if (!(sendTo_.empty() && toForget_.empty()) && !isSending_ && !isStopped_) {
    isSending_ = true;
    engine_->loop().post([this] { sendReports(); });
  }
  armTimer();
}

void Membership::publish() {
  const ViewReport& report = agreement_.report();
  if (report.out().empty() && report.joins.empty() && report.term.number == 0) return;
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
  const auto to = std::exchange(sendTo_, {});
  if (!agreement_.joins().empty()) failpoint("join-reported");
  for (const EngineId& id : to) {
    if (published_.empty()) break;
    if (id == engine_->id()) continue;
    const Status sent = engine_->send(id, kMembershipTopic, published_);  // [send]
    // Sent again later if it matters. The end of the peer is reported as evidence.
    if (sent.code() == ErrorCode::kExhausted)
      log(LogLevel::kWarning, engine_->logName(), "a report is late: ", sent.error().message);
  }
  for (const auto& there : std::exchange(toForget_, {})) engine_->forgetSoon(there);
}

void Membership::note(const Accusation& accusation) {
  const auto [rank, cause, by] = accusation;
  const auto roster = this->roster();
  const EngineId& id = roster->term.holders[size_t(rank)]->id;
  Seen seen{accusation, {}, std::chrono::system_clock::now(), Clock::now()};
  if (const auto ours = evidence_.find(id); ours != evidence_.end()) {
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
  if (const auto before = seen_.find(id); before != seen_.end())
    seen.since = std::min(seen.since, before->second.since);
  seen_[id] = std::move(seen);
}

// The reason for the log: "died (process exited)".
std::string Membership::reasonOf(int rank) const {
  const Seen* seen = seenOf(*roster_, rank);
  if (!seen) return "lost";
  const auto ours = evidence_.find(roster_->term.holders[size_t(rank)]->id);
  const Accusation* why = &seen->accusation;
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
    case Cause::kSuspects:
      return "refused (it cannot hear all ranks)";
    case Cause::kSeatTaken:
      return "refused (another process gets the rank)";
  }
  return "lost";
}

// "ranks 1, 2 died (process exited), rank 3 left".
std::string Membership::describe(const JobRanks& ranks) const {
  RankTexts reasons;
  {
    Lock lock(mutex_);
    ranks.forEach([&](int rank) {
      mutex_.assertHeld();
      reasons.add(rank, reasonOf(rank));
    });
  }
  return reasons.join(", ", [](const std::vector<int>& alike, const std::string& reason) {
    return nameRanks(alike) + " " + reason;
  });
}

void Membership::fence(const JobRanks& out, const Roster& roster) {
  out.forEach([&](int rank) {
    if (const auto& there = roster.peer(rank)) there->channel->beginFence();
  });
  out.forEach([&](int rank) {
    if (const auto& there = roster.peer(rank)) there->channel->fence();
  });
}

// A later view of the same roster.
void Membership::commit(const View& view) {
  JobRanks out;
  bool isLoss = false;
  {
    Lock lock(mutex_);
    out = view_.active - view.active;
    view_ = view;
    out.forEach([&](int rank) {
      mutex_.assertHeld();
      const Seen* seen = seenOf(*roster_, rank);
      isLoss = isLoss || !seen || !isGoodbye(seen->accusation.cause);
    });
  }
  fence(out, *roster());
  const bool isNews = isLoss && !agreement_.isCandidate();
  log(isNews ? LogLevel::kWarning : LogLevel::kInfo, engine_->logName(), describe(out),
      whoContinues(view));
  for (const auto& [listener, roster] : listeners_)
    listener->onView(roster ? viewOf(*roster) : view);
}

// The next term. Everything that is kept by rank belongs to the holder that has gone.
void Membership::enter(const ViewActions::NextTerm& next) {
  const auto before = roster();
  const View last = view();
  auto after = std::make_shared<Roster>();
  after->term = next.term;
  JobRanks out, filled;
  for (int rank = 0; rank < size(); ++rank) {
    const auto& holder = next.term.holders[size_t(rank)];
    auto& there = after->peers.emplace_back();
    if (before->term.hasSameHolder(next.term, rank)) {
      there = before->peer(rank);
      continue;
    }
    if (last.active.contains(rank)) out.add(rank);
    if (!holder) continue;
    filled.add(rank);
    if (holder->id == engine_->id()) continue;
    there = engine_->find(holder->id);
    if (!there) admission_.await(holder->id);
  }
  fence(out, *before);
  const std::string losses = out.empty() ? "" : describe(out);
  const View view{next.term.epoch, next.term.active()};
  {
    Lock lock(mutex_);
    roster_ = after;
    view_ = view;
  }
  failpoint("term-closed");
  const bool isNews = before->term.rankOf(engine_->id()).has_value();
  if (!out.empty())
    log(isNews ? LogLevel::kWarning : LogLevel::kInfo, engine_->logName(), losses,
        whoContinues(view));
  filled.forEach([&](int rank) {
    const EngineId& id = next.term.holders[size_t(rank)]->id;
    if (id == engine_->id()) return;
    log(LogLevel::kInfo, engine_->logName(), "rank ", rank, " is ", admission_.describe(id),
        whoContinues(view));
  });

  for (const EngineId& id : next.excluded) sendTo_.insert(id);
  ranks_.clear();
  for (int rank = 0; rank < size(); ++rank) {
    const auto& holder = next.term.holders[size_t(rank)];
    if (!holder) continue;
    if (holder->id != engine_->id()) ranks_[holder->id] = rank;
    admission_.hasEntered(holder->id);
  }
  for (int rank = 0; rank < size(); ++rank) {
    const auto& gone = before->term.holders[size_t(rank)];
    if (!gone || before->term.hasSameHolder(next.term, rank)) continue;
    admission_.isOut(gone->id);
    evidence_.erase(gone->id);
    if (const auto& there = before->peer(rank)) toForget_.push_back(there);
  }
  held_ = HeldReports(timingFor(options_.failureTimeout).resend);
  for (const auto& [listener, roster] : listeners_) {
    listener->onView(roster ? viewOf(*roster) : view);
    listener->onRoster(after);
  }
}

Error Membership::evictedBy(const ViewActions::Eviction& eviction) const {
  const auto& [rank, cause, by] = eviction.why;
  if (agreement_.isCandidate()) {
    const bool isHeld = cause == Cause::kSeatTaken;
    return {isHeld ? ErrorCode::kRefused : ErrorCode::kInterrupted,
            "the job did not let this process in as rank " + std::to_string(rank) + ": rank " +
                std::to_string(by) + " says '" + nameOf(cause) + "'; try again with a new engine"};
  }
  return {ErrorCode::kEvicted,
          "invalid state: this rank is not active: the job goes on without rank " +
              std::to_string(rank) + " in epoch " + std::to_string(eviction.epoch) + ", as rank " +
              std::to_string(eviction.toldBy) + " said and we learned at " + nowInWords() +
              "; rank " + std::to_string(by) + " accused it: " + nameOf(cause) + kComesBack};
}

Error Membership::inMinority() const {
  if (agreement_.isCandidate()) {
    return {ErrorCode::kPeerLost, "rank " + std::to_string(options_.rank) +
                                      " cannot join: the ranks of the job were lost meanwhile"};
  }
  JobRanks lost;
  RankTexts causes;
  {
    Lock lock(mutex_);
    view_.active.forEach([&](int rank) {
      mutex_.assertHeld();
      const Seen* one = seenOf(*roster_, rank);
      if (!one) return;
      lost.add(rank);
      causes.add(rank, nameOf(one->accusation.cause));
    });
  }
  const auto phrase = [](const std::vector<int>& ranks, const std::string& cause) {
    return nameRanks(ranks) + " (" + cause + ")";
  };
  return {ErrorCode::kMinority,
          "too few ranks are left on this side to go on: of " + listOf(agreement_.view().active) +
              " of epoch " + std::to_string(agreement_.view().epoch) + " we have lost " +
              causes.join(", ", phrase) + ", which may go on without us; since " + nowInWords() +
              kComesBack};
}

// Adds a connection that came after its rank had entered the roster.
void Membership::addPeer(int rank, const std::shared_ptr<Peer>& peer) {
  const auto before = roster();
  if (before->peer(rank) == peer) return;
  auto after = std::make_shared<Roster>(*before);
  after->peers[size_t(rank)] = peer;
  {
    Lock lock(mutex_);
    roster_ = after;
  }
  for (const auto& [listener, roster] : listeners_) listener->onRoster(after);
}

void Membership::end(const Error& why) {
  {
    Lock lock(mutex_);
    if (!standing_.ok() || hasLeft_.load(std::memory_order_acquire)) return;
    standing_ = why;
  }
  isOver_.store(true, std::memory_order_release);
  log(LogLevel::kError, engine_->logName(), why.message);
  for (const auto& [listener, roster] : listeners_) listener->onOver(why);
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
  const auto orAt = [&](Clock::time_point when) { next = next ? std::min(*next, when) : when; };
  if (!isStopped_ && !goodbyes_.empty()) orAt(goodbyesHeldUntil_);
  if (const auto until = isStopped_ ? std::nullopt : admission_.nextTick()) orAt(*until);
  if (next == timerAt_) return;
  engine_->loop().cancel(timer_);
  timerAt_ = next;
  if (!next) return;
  timer_ = engine_->loop().runAt(Deadline::at(*next), [this] {
    timerAt_.reset();
    if (Clock::now() >= goodbyesHeldUntil_) takeGoodbyes();
    takeHeld();
    admission_.look();
    act(agreement_.tick(Clock::now()));
  });
}

}  // namespace mooncake
