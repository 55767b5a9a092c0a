#include "membership/member_exchange.h"

#include <algorithm>

#include "base/backoff.h"
#include "base/failpoint.h"
#include "base/rank_list.h"

namespace mooncake {
namespace {

// Message, wire form:  u8 kind | the part for kPart, nothing for kAsk, a text (<= 1024) for kGaveUp
constexpr size_t kMostText = 1024;
// Interval between two looks at the job's view.
constexpr auto kLook = std::chrono::milliseconds(10);
// First and longest pause before asking again. A member that has not come yet cannot answer; a
// member that came, but whose message was lost, can.
constexpr auto kFirstAsk = std::chrono::milliseconds(50);
constexpr auto kLastAsk = std::chrono::seconds(1);

ByteView viewOf(const std::string& text) {
  return std::as_bytes(std::span(text.data(), std::min(text.size(), kMostText)));
}

template <typename Kind>
Bytes encode(Kind kind, ByteView body) {
  return ByteWriter().put(static_cast<uint8_t>(kind)).putRaw(body).take();
}

// Sends the message to each member in the job. A member may lose it and ask for it when the sender's
// exchange is gone, so the engine repeats it.
void tellMembers(const Membership& membership, const MemberExchange::Options& options,
                 const Bytes& message) {
  const View view = membership.viewOf(*options.roster);
  std::vector<std::shared_ptr<Peer>> members;
  for (const int job : options.jobRanks) {
    const auto& peer = options.roster->peer(job);
    if (peer && view.active.contains(job)) members.push_back(peer);
  }
  membership.engine().keepLastWords(members, options.topic, {message});
  for (const auto& peer : members) (void)membership.engine().send(*peer, options.topic, message);
}

std::string nameGivingUp(const MemberExchange::Options& options, int rank) {
  return "rank " + std::to_string(rank) + " could not make group '" + options.group + "': ";
}

}  // namespace

// Opens the topic before it sends, so that replies find the topic open.
MemberExchange::MemberExchange(std::shared_ptr<Membership> membership, Options options, Bytes mine)
    : membership_(std::move(membership)),
      options_(std::move(options)),
      mine_(std::move(mine)),
      parts_(options_.jobRanks.size()) {
  const auto size = static_cast<int>(options_.jobRanks.size());
  for (int r = 0; r < size; ++r) {
    if (const auto& peer = options_.roster->peer(options_.jobRanks[size_t(r)]))
      ranksById_[peer->id] = r;
  }
  parts_[size_t(options_.rank)] = mine_;
  membership_->engine().openTopic(
      options_.topic, [this](const EngineId& from, ByteView message) { onMessage(from, message); });
  // Tells every member, also one whose part is here: we may be done and gone before it asks.
  tellMembers(*membership_, options_, encode(Kind::kPart, mine_));
  failpoint("part-told");
}

MemberExchange::~MemberExchange() { membership_->engine().closeTopic(options_.topic); }

Result<std::vector<std::optional<Bytes>>> MemberExchange::collect(Deadline deadline,
                                                                  const StopSignal* stop) {
  Repetition asking({kFirstAsk, kLastAsk}, Clock::now());
  Lock lock(mutex_);
  for (;;) {
    MOONCAKE_TRY(membership_->standing());
    if (gaveUp_) return *gaveUp_;
    if (stop && stop->isStopped())
      return Error{ErrorCode::kInterrupted,
                   "group '" + options_.group + "' is not wanted any more"};
    const std::vector<int> absent = missing(membership_->viewOf(*options_.roster));
    if (absent.empty()) return parts_;
    if (deadline.passed()) return timedOut(absent);
    if (asking.takeDue(Clock::now())) {
      for (const int r : absent) tell(r, Kind::kAsk, {});
    }
    changed_.wait_until(mutex_, deadline.earlier(Deadline::after(kLook)).when());
  }
}

Error MemberExchange::refuse(const std::shared_ptr<Membership>& membership, const Options& options,
                             const Error& why) {
  tellMembers(*membership, options, encode(Kind::kGaveUp, viewOf(why.message)));
  return {why.code, nameGivingUp(options, options.rank) + why.message};
}

void MemberExchange::giveUp(const Error& why) {
  {
    Lock lock(mutex_);
    if (gaveUp_) return;
  }
  (void)refuse(membership_, options_, why);
}

// Members in the job whose parts are waited for and have not come.
std::vector<int> MemberExchange::missing(const View& view) const {
  std::vector<int> ranks;
  for (size_t r = 0; r < parts_.size(); ++r) {
    if (!parts_[r] && !options_.unawaited.contains(int(r)) &&
        view.active.contains(options_.jobRanks[r]))
      ranks.push_back(int(r));
  }
  return ranks;
}

Error MemberExchange::timedOut(const std::vector<int>& missing) const {
  return {ErrorCode::kTimeout, "group '" + options_.group +
                                   "': " + nameRanks(missing, options_.jobRanks) + " of " +
                                   std::to_string(parts_.size()) +
                                   " did not come to make it in time, though the job has them "
                                   "(do they make the same groups in the same order?)"};
}

// A failed send is ignored: the peer is soon out, or it reconnects and asks.
void MemberExchange::tell(int rank, Kind kind, ByteView body) {
  if (const auto& peer = options_.roster->peer(options_.jobRanks[size_t(rank)]))
    (void)membership_->engine().send(*peer, options_.topic, encode(kind, body));
}

void MemberExchange::onMessage(const EngineId& from, ByteView message) {
  const auto sender = ranksById_.find(from);
  if (sender == ranksById_.end()) return;
  const int rank = sender->second;
  ByteReader in(message);
  const auto kind = static_cast<Kind>(in.get<uint8_t>());
  if (kind == Kind::kAsk) return tell(rank, Kind::kPart, mine_);
  const ByteView body = in.getRaw(in.left());
  Lock lock(mutex_);
  if (kind == Kind::kPart && !parts_[size_t(rank)]) {
    parts_[size_t(rank)].emplace(body.begin(), body.end());
  } else if (kind == Kind::kGaveUp && !gaveUp_ && body.size() <= kMostText &&
             !options_.unawaited.contains(rank)) {
    std::string text;
    for (const std::byte character : body) text += char(character);
    gaveUp_ = Error{ErrorCode::kAborted, nameGivingUp(options_, rank) + text};
  }
  changed_.notify_all();
}

}  // namespace mooncake
