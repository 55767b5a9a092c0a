#include "membership/candidacy.h"

#include <algorithm>
#include <array>
#include <set>
#include <unistd.h>
#include <utility>

#include "base/backoff.h"
#include "base/failpoint.h"
#include "base/log.h"

namespace mooncake {
namespace {

using std::chrono::milliseconds;

// Bounds of the pause before a newcomer asks again.
constexpr milliseconds kLeastPause(5);
constexpr milliseconds kMostPause(200);
// How long it tries at least to reach a member.
constexpr milliseconds kReach(500);

std::string hostName() {
  std::array<char, JoinRequest::kMostHost + 1> name{};
  if (::gethostname(name.data(), name.size() - 1) != 0) return "an unknown host";
  return name.data();
}

// The first of many, each once.
std::string shortList(const std::vector<std::string>& texts) {
  constexpr size_t kShown = 3;
  const std::set<std::string> each(texts.begin(), texts.end());
  std::string list;
  size_t count = 0;
  for (const std::string& text : each) {
    if (++count <= kShown) list += (list.empty() ? "" : "; ") + text;
  }
  return count > kShown ? list + "; and " + std::to_string(count - kShown) + " more" : list;
}

}  // namespace

Candidacy::Candidacy(std::shared_ptr<Engine> engine, JoinOptions options, Deadline deadline,
                     const StopSignal* stop)
    : engine_(std::move(engine)),
      options_(std::move(options)),
      deadline_(deadline),
      stop_(stop),
      resend_(std::clamp(options_.failureTimeout / 10, milliseconds(50), milliseconds(500))) {
  engine_->openTopic(kJoinTopic, [this](const EngineId& from, ByteView message) {
    auto decoded = decodeJoinMessage(message);
    if (!decoded.ok()) return;
    Lock lock(mutex_);
    if (inbox_.size() < kMostMessages) inbox_.emplace_back(from, std::move(*decoded));
    changed_.notify_all();
  });
}
JoinRequest Candidacy::request() const {
  return {.identity = options_.identity,
          .rank = options_.rank,
          .size = options_.size,
          .process = static_cast<uint32_t>(::getpid()),
          .host = hostName(),
          .endpoint = engine_->endpoint()};
}

Error Candidacy::timedOut() const {
  return {ErrorCode::kTimeout,
          "rank " + std::to_string(options_.rank) +
              " could not join the job in time: " + (last_.empty() ? "no member answered" : last_)};
}

// Members may wait for us already, to agree on losses, too.
Error Candidacy::givesUp() const {
  return {ErrorCode::kInterrupted,
          "rank " + std::to_string(options_.rank) + " begins again with a new engine: " + last_};
}

// The next message, or null: something else has changed, or the time has passed.
std::optional<std::pair<EngineId, JoinMessage>> Candidacy::next(Deadline until) {
  Lock lock(mutex_);
  if (inbox_.empty() && !isThrough() && !over_) changed_.wait_until(mutex_, until.when());
  if (inbox_.empty()) return std::nullopt;
  auto first = std::move(inbox_.front());
  inbox_.pop_front();
  return first;
}

bool Candidacy::hasEntered() const { return roster_ && roster_->term.rankOf(engine_->id()); }

bool Candidacy::isThrough() const {
  if (!hasEntered()) return false;
  bool hasMetAll = true;
  view_.active.forEach([&](int rank) {
    mutex_.assertHeld();
    hasMetAll = hasMetAll && (rank == options_.rank || roster_->peer(rank));
  });
  return hasMetAll;
}

void Candidacy::take(const RosterPart& part, std::optional<Asked>& asked) const {
  if (part.size <= options_.rank) return;
  if (!asked || asked->term.number != part.number || asked->view.epoch != part.viewEpoch) {
    asked.emplace();
    asked->term = {.number = part.number, .epoch = part.epoch};
    asked->term.holders.resize(size_t(part.size));
    asked->view.epoch = part.viewEpoch;
    asked->endpoints.resize(size_t(part.size));
    asked->missing = JobRanks::firstRanks(part.size);
  }
  for (size_t i = 0; i < part.seats.size(); ++i) {
    const int rank = part.first + static_cast<int>(i);
    asked->missing -= JobRanks{rank};
    const auto& seat = part.seats[i];
    if (!seat) continue;
    asked->term.holders[size_t(rank)] = seat->holder;
    if (seat->isActive) asked->view.active.add(rank);
    asked->endpoints[size_t(rank)] = seat->endpoint;
  }
}

// kRefused: asking again does not help. After other errors it may.
Result<Candidacy::Asked> Candidacy::ask(Peer& member) {
  const Bytes words = encodeJoinMessage(request());
  const Deadline until = deadline_.earlier(Deadline::after(options_.failureTimeout));
  Deadline due = Deadline::after(Clock::duration::zero());
  std::optional<Asked> asked;
  while (!until.passed() && !member.disconnected && !isStopped()) {
    if (due.passed()) {
      MOONCAKE_TRY(engine_->send(member, kJoinTopic, words));
      failpoint("asked");
      due = Deadline::after(resend_);
    }
    const auto message = next(until.earlier(due));
    if (!message || message->first != member.id) continue;
    if (const auto* refusal = std::get_if<JoinRefusal>(&message->second)) {
      // A member that is out itself says nothing about the job.
      const bool isOver = refusal->reason == JoinRefusal::Reason::kOver;
      const ErrorCode why = refusal->isForNow() ? ErrorCode::kInterrupted : ErrorCode::kRefused;
      return Error{isOver ? ErrorCode::kPeerLost : why,
                   "rank " + std::to_string(options_.rank) + " cannot join: " + refusal->text};
    }
    if (const auto* part = std::get_if<RosterPart>(&message->second)) take(*part, asked);
    if (asked && asked->missing.empty()) return std::move(*asked);
  }
  return Error{ErrorCode::kTimeout, member.name + " does not answer"};
}

Result<std::shared_ptr<Roster>> Candidacy::connectAll(const Asked& asked) {
  auto roster = std::make_shared<Roster>();
  roster->term = asked.term;
  roster->peers.resize(size_t(asked.term.size()));
  const Deadline until = deadline_.earlier(Deadline::after(options_.failureTimeout));
  Status failed;
  asked.view.active.forEach([&](int rank) {
    if (!failed.ok()) return;
    auto peer =
        engine_->open(asked.endpoints[size_t(rank)], "rank " + std::to_string(rank), until, stop_);
    if (!peer.ok()) {
      failed = peer.status();
    } else {
      roster->peers[size_t(rank)] = *peer;
    }
  });
  if (!failed.ok()) return failed.error();
  return roster;
}

void Candidacy::meet(const JoinMessage& message) {
  const auto* meeting = std::get_if<JoinMeeting>(&message);
  if (!meeting) return;
  // It may have ended meanwhile. If not, we hear of it again.
  const auto peer = engine_->open(meeting->endpoint, "rank " + std::to_string(meeting->rank),
                                  deadline_.earlier(Deadline::after(resend_)), stop_);
  if (!peer.ok()) return log(LogLevel::kInfo, engine_->logName(), peer.error().message);
  if (*peer) {
    (void)engine_->send(**peer, kJoinTopic,
                        encodeJoinMessage(JoinMeeting{options_.rank, engine_->endpoint()}));
  }
}

// Null: the roster has changed meanwhile.
Result<std::shared_ptr<Membership>> Candidacy::enter(const Asked& asked,
                                                     std::shared_ptr<Roster> roster) {
  const auto peers = roster->peers;
  const TermId term = roster->term.id();
  std::shared_ptr<Membership> membership(new Membership(engine_,
                                                        {.rank = options_.rank,
                                                         .failureTimeout = options_.failureTimeout,
                                                         .waitsFile = options_.waitsFile,
                                                         .identity = options_.identity},
                                                        std::move(roster), true));
  membership->subscribe(this);  // first, because messages wait for it to open
  membership->open();
  const auto done = [&] { membership->unsubscribe(this); };
  JoinRequest connected = request();
  connected.connected = {term, asked.view.epoch};
  const Bytes words = encodeJoinMessage(connected);
  Clock::time_point due = Clock::now();
  // Ends of members are the agreement's matter. Only if it goes on without us, it has to tell us.
  size_t lost = 0;
  for (;;) {
    const bool isLate = deadline_.passed() || isStopped();
    {
      Lock lock(mutex_);
      if (isThrough() || over_ || (isLate && hasEntered())) break;
    }
    const auto now = Clock::now();
    const auto isLost = [](const auto& peer) { return peer && peer->disconnected; };
    const auto lostNow = size_t(std::ranges::count_if(peers, isLost));
    if (std::exchange(lost, lostNow) != lostNow) due = std::min(due, now + kLeastPause);
    if (now >= due && !isLate) {
      failpoint("connected");
      isOffered_ = true;
      for (const auto& peer : peers) {
        if (peer) (void)engine_->send(*peer, kJoinTopic, words);
      }
      due = now + (lost > 0 ? std::min<Clock::duration>(resend_, kMostPause / 4) : resend_);
    }
    const auto message = next(Deadline::at(std::min(due, now + Clock::duration(kMostPause))));
    bool isOld = isLate;
    if (message) {
      meet(message->second);
      if (const auto* refusal = std::get_if<JoinRefusal>(&message->second)) {
        last_ = refusal->text;
        isOld = true;
      }
      const auto* part = std::get_if<RosterPart>(&message->second);
      isOld =
          isOld || (part && (part->number != term.number || part->viewEpoch > asked.view.epoch));
    }
    isOld = isOld || lost == size_t(asked.view.active.count());
    if (isOld && membership->stopUnlessJoined()) {
      done();
      return std::shared_ptr<Membership>();
    }
    if (isLate) {  // a member has added us, so this engine's time is over
      done();
      return timedOut();
    }
  }
  done();
  failpoint("told");
  Lock lock(mutex_);
  if (over_) return *over_;
  return membership;
}

Result<std::shared_ptr<Membership>> Candidacy::run() {
  const auto began = Clock::now();
  const auto patience = 2 * options_.failureTimeout + std::chrono::seconds(1);
  Clock::duration pause = kLeastPause;
  Clock::time_point reached = began;   // when a member was reached last
  std::vector<std::string> unreached;  // why each member was not, at first
  for (size_t turn = 0;; ++turn) {
    if (isStopped()) return Error{ErrorCode::kAborted, "joining the job was stopped"};
    if (deadline_.passed()) return timedOut();
    if (turn > 0) {
      (void)next(deadline_.earlier(Deadline::after(jittered(pause))));
      pause = doubled(pause, kMostPause);
    }
    const Bytes& address = options_.members[turn % options_.members.size()];
    auto member = engine_->open(address, "a member of the job",
                                deadline_.earlier(Deadline::after(options_.failureTimeout)), stop_);
    if (!member.ok()) {
      last_ = member.error().message;
      if (unreached.size() < options_.members.size()) unreached.push_back(last_);
      if (isOffered_) return givesUp();
      if (Clock::now() - reached > std::max(options_.failureTimeout / 10, kReach) &&
          turn + 1 >= options_.members.size())
        return Error{ErrorCode::kPeerLost,
                     "no member of the job can be reached: " + shortList(unreached)};
      continue;
    }
    if (!*member) continue;  // that is this engine
    reached = Clock::now();
    auto asked = ask(**member);
    if (!asked.ok()) {
      // What a member has said tells more than that another one did not answer.
      if (asked.error().code != ErrorCode::kTimeout || last_.empty()) last_ = asked.error().message;
      const bool isHeld =
          asked.error().code == ErrorCode::kInterrupted && Clock::now() - began > patience;
      if (asked.error().code == ErrorCode::kRefused || isHeld)
        return Error{ErrorCode::kRefused, last_};
      if (isOffered_) return givesUp();
      continue;
    }
    auto roster = connectAll(*asked);
    if (!roster.ok()) {
      last_ = roster.error().message;
      if (isOffered_) return givesUp();
      continue;
    }
    auto membership = enter(*asked, std::move(*roster));
    if (!membership.ok()) return membership.error();
    if (*membership) return std::move(*membership);
    pause = kLeastPause;
  }
}

}  // namespace mooncake
