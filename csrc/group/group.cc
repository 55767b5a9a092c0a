#include "group/group.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <random>
#include <sys/mman.h>

#include "engine/rendezvous/address_book.h"
#include "group/barrier.h"
#include "membership/membership_env.h"

namespace mooncake {
namespace {

// A rank of a job publishes:    u32 version  bytes endpoint (route.cc)  u64 topic  part
// A member of a group sends:    part
// A part:                       bytes part of the window (window.cc)  bytes part of the mailboxes'
//                               window, empty without messages  bool raises
// The version covers all later formats, too: slots, mailboxes, stamps and messages. The group uses
// the topic of rank 0.
constexpr uint32_t kMemberVersion = 12;

// Up to 64 KiB one exchange of slots beats a second round of signals, even with eight ranks on two
// cores. A slot holds four times that, for operations over messages in which only one rank sends.
// Above 128 ranks it holds less, so that the inboxes of a rank take at most 64 MiB of address space
// up to 512 ranks. Beyond, alltoall's table decides the size: with 1024 ranks the inboxes take 136
// MiB.
constexpr size_t kEagerBytes = 64 << 10;
constexpr size_t kSlotBytes = 256 << 10;
constexpr size_t kInboxBudget = 64 << 20;
constexpr size_t kLeastEagerBytes = 4 << 10;
constexpr size_t kTableBytesPerRank =
    64;  // alltoall's table of splits and regions must fit in any case

uint64_t randomNumber() {
  std::random_device source;
  return uint64_t(source()) << 32 | source();
}

size_t chooseSlotBytes(const GroupEnv& env, int size) {
  const size_t wanted =
      env.eagerBytes ? env.eagerBytes
                     : std::bit_floor(std::min(kInboxBudget / (2 * size_t(size)), kSlotBytes));
  return std::max(wanted, kLeastEagerBytes + kTableBytesPerRank * size_t(size));
}

int foundersOf(const GroupOptions& options) {
  return options.founders > 0 ? options.founders : options.size;
}

}  // namespace

// Data about the members, once they have met.
struct Group::Meeting {
  std::vector<std::shared_ptr<Peer>> peers;  // null: this rank
  std::shared_ptr<const Roster> roster;      // of the job at that moment
  std::vector<Parts> parts;
  std::vector<int> jobRanks;
  uint64_t topic = 0;
  bool isWholeJob = false;
};

Result<std::unique_ptr<Group>> Group::create(std::shared_ptr<Engine> engine, Store& store,
                                             GroupOptions options, Deadline deadline) {
  const int rank = options.rank, size = foundersOf(options);
  const auto inStore = [&](const Result<Bytes>& mine) {
    return mine.ok() ? exchange(store, kPublished, rank, size, *mine, deadline) : mine.error();
  };
  auto group = create(std::move(engine), inStore, std::move(options), deadline);
  // kInterrupted: no rank waits for an earlier attempt.
  if (!group.ok() && group.error().code != ErrorCode::kInterrupted)
    return tellFailure(store, rank, group.error());
  return group;
}

Result<std::unique_ptr<Group>> Group::create(std::shared_ptr<Engine> engine,
                                             const Exchange& exchange, GroupOptions options,
                                             Deadline deadline) {
  auto group = prepare(std::move(engine), std::move(options));
  if (!group.ok()) {
    const auto told = exchange(group.error());
    return told.ok() ? group.error() : told.error();
  }
  auto meeting = (*group)->meet(exchange, deadline);
  if (!meeting.ok()) return meeting.error();
  MOONCAKE_TRY((*group)->start(std::move(*meeting)));
  MOONCAKE_TRY((*group)->beginJob(deadline));
  (*group)->engine().startSilenceDetection();
  return group;
}

// The job begins on all of its ranks or on none. If a rank is out of the view before the barrier
// begins, the barrier ends well over fewer ranks. The contributors of an operation are the same on
// all survivors, so either all of them raise or none does.
Status Group::beginJob(Deadline deadline) {
  const Status begun = barrier(*this, deadline);
  if (!lastView || (!begun.ok() && begun.code() != ErrorCode::kPeerLost)) return begun;
  RankTexts lost;
  for (int r = 0; r < foundersOf(options_); ++r) {
    if (!lastView->contains(r)) lost.add(r, whyGone(r));
  }
  if (lost.empty()) return begun;
  // A survivor that left at once would be named by the other ranks as lost, too.
  leave(deadline.earlier(Deadline::after(engine().env().failureTimeout)));
  const auto phrase = [this](const std::vector<int>& ranks, const std::string& why) {
    return nameRanks(ranks) + " (" + why + ")";
  };
  return {ErrorCode::kPeerLost, nameRank(rank()) + " cannot begin the job of " +
                                    std::to_string(foundersOf(options_)) + " ranks, which lost " +
                                    lost.join(", ", phrase) +
                                    " before it had begun: look at the log of the lost rank, then "
                                    "start all ranks again"};
}

Result<std::unique_ptr<Group>> Group::createWithin(std::shared_ptr<Membership> job,
                                                   GroupOptions options, Deadline deadline,
                                                   std::shared_ptr<const Roster> roster) {
  // Every member counts the group, also if it cannot make it.
  const auto topics = job->newTopics(options.name, jobRanksOf(options));
  if (!topics.ok()) return topics.error();
  return createOn(std::move(job), std::move(options), *topics, std::move(roster), deadline);
}

std::vector<int> Group::jobRanksOf(const GroupOptions& options) {
  std::vector<int> ranks = options.jobRanks.empty() ? options.globalRanks : options.jobRanks;
  for (int r = static_cast<int>(ranks.size()); r < options.size; ++r) ranks.push_back(r);
  return ranks;
}

Result<std::unique_ptr<Group>> Group::createOn(std::shared_ptr<Membership> job,
                                               GroupOptions options, Topics topics,
                                               std::shared_ptr<const Roster> roster,
                                               Deadline deadline, const StopSignal* stop) {
  MemberExchange::Options place{.group = options.name,
                                .topic = topics.first,
                                .jobRanks = jobRanksOf(options),
                                .rank = options.rank,
                                .roster = roster ? std::move(roster) : job->roster()};
  auto group = prepare(job->sharedEngine(), std::move(options));
  if (!group.ok()) return MemberExchange::refuse(job, place, group.error());
  (*group)->membership_ = std::move(job);
  auto meeting = (*group)->meetInJob(std::move(place), topics.second, deadline, stop);
  const Status made = meeting.ok() ? (*group)->start(std::move(*meeting)) : meeting.status();
  if (made.ok()) return group;
  // A member that does not want it any more tells the others why, if they need to know.
  auto& exchange = (*group)->exchange_;
  if (exchange && made.code() != ErrorCode::kInterrupted) exchange->giveUp(made.error());
  return made.error();
}

Result<std::unique_ptr<Group>> Group::prepare(std::shared_ptr<Engine> engine,
                                              GroupOptions options) {
  const int size = options.size;
  if (size > kMaxRanks) {
    return Error{ErrorCode::kUnsupported, "a group of " + std::to_string(size) +
                                              " ranks; the most is " + std::to_string(kMaxRanks)};
  }
  const size_t slotBytes = std::max(chooseSlotBytes(options.env, size), options.slotBytes);
  const size_t eagerBytes = options.env.eagerBytes ? slotBytes : std::min(slotBytes, kEagerBytes);
  const PartLayout layout(size, slotBytes, options.pushBytes);
  std::unique_ptr<Group> group(new Group(std::move(options), layout, slotBytes, eagerBytes));
  const size_t arenaBytes = engine->arena().capacity();
  if (!group->options_.bell) {
    auto bell = LineBell::create(*engine);
    if (!bell.ok()) return group->withoutRoom(bell.error(), arenaBytes);
    group->options_.bell = std::move(*bell);
  }
  auto window = Window::create(engine, layout.bytes(), group->options_.bell);
  if (!window.ok()) return group->withoutRoom(window.error(), arenaBytes);
  group->window_ = std::move(*window);
  if (const size_t bytes = group->options_.mailboxBytes * size_t(size); bytes > 0) {
    auto mailboxes = Window::create(engine, bytes, group->options_.bell);
    if (!mailboxes.ok()) return group->withoutRoom(mailboxes.error(), arenaBytes);
    group->mailboxes_ = std::move(*mailboxes);
  }
  return group;
}

Error Group::withoutRoom(Error why, size_t arenaBytes) const {
  if (why.code != ErrorCode::kExhausted) return why;
  const size_t bytes =
      2 * Window::kUserOffset + layout_.bytes() + options_.mailboxBytes * size_t(size());
  why.message = "group '" + name() + "' cannot be made on " + nameRank(rank()) + ": " +
                why.message + ". Each group of this size takes " + std::to_string(bytes) +
                " bytes, so " + std::to_string(arenaBytes / bytes) +
                " fit if nothing else is there. Destroy groups that are not used, raise "
                "MOONCAKE_ARENA_BYTES, or set a smaller MOONCAKE_EAGER_BYTES on all ranks, "
                "which makes groups smaller";
  return why;
}

Bytes Group::describePart() const {
  return ByteWriter()
      .putBytes(window_->describe())
      .putBytes(mailboxes_ ? mailboxes_->describe() : Bytes())
      .put(options_.raises)
      .take();
}

Result<Group::Parts> Group::takePart(ByteReader& in, int rank) const {
  const auto window = in.getBytes(1 << 9);
  const auto mailboxes = in.getBytes(1 << 9);
  const bool raises = in.get<bool>();
  MOONCAKE_TRY(in.finish("address of rank " + std::to_string(rank)));
  if (raises != options_.raises) {
    return Error{ErrorCode::kMismatch, "rank " + std::to_string(rank) + " chose on_failure='" +
                                           (raises ? "raise" : "continue") + "', rank " +
                                           std::to_string(this->rank()) +
                                           " the other one: choose the same on all ranks"};
  }
  if (mailboxes.empty() != (mailboxes_ == nullptr)) {
    return Error{ErrorCode::kMismatch,
                 "rank " + std::to_string(rank) + " made its group with" +
                     (mailboxes_ ? "out" : "") + " messages, rank " + std::to_string(this->rank()) +
                     " with" + (mailboxes_ ? "" : "out") + ": do all ranks have the same options?"};
  }
  return Parts{Bytes(window.begin(), window.end()), Bytes(mailboxes.begin(), mailboxes.end())};
}

Result<Group::Meeting> Group::meet(const Exchange& exchange, Deadline deadline) {
  const Bytes mine = ByteWriter()
                         .put(kMemberVersion)
                         .putBytes(engine().endpoint())
                         .put(randomNumber())
                         .putRaw(describePart())
                         .take();
  auto all = exchange(mine);
  if (!all.ok()) return all.error();
  const int founders = foundersOf(options_);
  if (all->size() != size_t(founders)) {
    return Error{ErrorCode::kProtocol, "the exchange of addresses returned " +
                                           std::to_string(all->size()) + " entries for " +
                                           std::to_string(founders) + " ranks"};
  }
  Meeting meeting{.isWholeJob = true};
  std::vector<Bytes> endpoints;
  for (int r = 0; r < founders; ++r) {
    ByteReader in((*all)[size_t(r)]);
    if (const auto version = in.get<uint32_t>(); version != kMemberVersion) {
      return Error{ErrorCode::kMismatch, "rank " + std::to_string(r) + " speaks version " +
                                             std::to_string(version) + " of the protocol, rank " +
                                             std::to_string(rank()) + " version " +
                                             std::to_string(kMemberVersion) +
                                             ": install the same mooncake-backend everywhere"};
    }
    const auto endpoint = in.getBytes(64 << 10);
    const auto topic = in.get<uint64_t>();
    auto part = takePart(in, r);
    if (!part.ok()) return part.error();
    if (r == 0) meeting.topic = topic;
    endpoints.emplace_back(endpoint.begin(), endpoint.end());
    meeting.parts.push_back(std::move(*part));
    meeting.jobRanks.push_back(r);
  }
  auto peers = engine().connect(endpoints, deadline);
  if (!peers.ok()) return peers.error();
  // Room for ranks that come later.
  peers->resize(size_t(size()));
  meeting.parts.resize(size_t(size()));
  for (int r = founders; r < size(); ++r) meeting.jobRanks.push_back(r);
  auto env = MembershipEnv::read();
  if (!env.ok()) return env.error();
  auto membership =
      Membership::start(window_->sharedEngine(), {.rank = rank(),
                                                  .peers = *peers,
                                                  .founders = founders,
                                                  .failureTimeout = engine().env().failureTimeout,
                                                  .waitsFile = std::move(env->waitsFile),
                                                  .identity = options_.identity});
  if (!membership.ok()) return membership.error();
  membership_ = std::move(*membership);
  meeting.peers = std::move(*peers);
  meeting.roster = membership_->roster();
  return meeting;
}

Result<Bytes> Group::endpointIn(ByteView published) {
  ByteReader in(published);
  const auto version = in.get<uint32_t>();
  if (!in.failed() && version != kMemberVersion) {
    return Error{ErrorCode::kMismatch, "the job speaks version " + std::to_string(version) +
                                           " of the protocol, this process version " +
                                           std::to_string(kMemberVersion) +
                                           ": install the same mooncake-backend everywhere"};
  }
  const ByteView endpoint = in.getBytes(64 << 10);
  if (in.failed()) return Error{ErrorCode::kProtocol, "a rank's entry in the store is cut off"};
  return Bytes(endpoint.begin(), endpoint.end());
}

Bytes Group::publishedBy(const Engine& engine) {
  return ByteWriter().put(kMemberVersion).putBytes(engine.endpoint()).take();
}

Result<Group::Meeting> Group::meetInJob(MemberExchange::Options place, uint64_t topic,
                                        Deadline deadline, const StopSignal* stop) {
  Meeting meeting{.roster = place.roster, .jobRanks = place.jobRanks, .topic = topic};
  exchange_ = std::make_unique<MemberExchange>(membership_, std::move(place), describePart());
  auto all = exchange_->collect(deadline, stop);
  if (!all.ok()) return all.error();
  for (int r = 0; r < size(); ++r) {
    meeting.peers.push_back(meeting.roster->peer(meeting.jobRanks[size_t(r)]));
    meeting.parts.emplace_back();
    if (!(*all)[size_t(r)]) continue;
    ByteReader in(*(*all)[size_t(r)]);
    auto part = takePart(in, r);
    if (!part.ok()) return part.error();
    meeting.parts.back() = std::move(*part);
  }
  return meeting;
}

Status Group::start(Meeting meeting) {
  std::vector<Bytes> parts, mailboxes;
  for (Parts& one : meeting.parts) {
    parts.push_back(std::move(one.window));
    mailboxes.push_back(std::move(one.mailboxes));
  }
  if (mailboxes_) MOONCAKE_TRY(mailboxes_->attach(rank(), meeting.peers, mailboxes));
  MOONCAKE_TRY(window_->attach(rank(), std::move(meeting.peers), parts));
  int onHost = 0;
  for (int r = 0; r < size(); ++r) {
    onHost += window_->peerPtr(r) != nullptr;
    usesCards_ = usesCards_ || window_->hasCards(r);
  }
  sources_.resize(size_t(size()));
  spin_ = window_->fullyMapped() ? SpinPolicy::forRanksOnHost(onHost) : SpinPolicy::forMessages();
  if (window_->fullyMapped()) {
    const auto core = [&](int r) {
      return reinterpret_cast<RankCores::Word*>(window_->peerPtr(r) + layout_.core());
    };
    std::vector<const RankCores::Word*> others;
    for (int r = 0; r < size(); ++r) {
      // A rank that was lost before it described its part has no word here.
      if (r != rank() && window_->peerPtr(r)) others.push_back(core(r));
    }
    cores_ = RankCores(core(rank()), std::move(others));
  }
  isCrowded_ = window_->fullyMapped() && spin_.pauses == 0;
  isOut_ = std::make_unique<std::atomic<bool>[]>(size_t(size()));
  topic_ = meeting.topic;
  roster_ = meeting.roster;
  agent_ = std::make_shared<FlushAgent>(  // [made]
      *this, *membership_,
      FlushAgent::Options{.group = name(),
                          .rank = rank(),
                          .jobRanks = std::move(meeting.jobRanks),
                          .roster = std::move(meeting.roster),
                          .topic = meeting.topic,
                          .raises = options_.raises,
                          .founds = meeting.isWholeJob,
                          .globalRanks = options_.globalRanks});
  GroupView first = *agent_->view();
  const std::vector<int> inJob = jobRanksOf(options_);
  std::erase_if(first.active, [&](int r) { return !roster_->isHeld(inJob[size_t(r)]); });
  onView(first);
  engine().watch(&bell()->interrupt(), &window_->bell());
  agent_->start();
  listed_ = std::make_unique<ListedGroup>(*this);
  return {};
}

Group::~Group() {
  listed_.reset();  // from here on the signal's thread does not read this group
  if (!window_) return;
  if (agent_) {
    agent_->stop();
    engine().unwatch(&bell()->interrupt());
  }
  reserved_.push_back(std::move(shared_));
  window_->retire(std::move(reserved_));
}

std::string Group::nameRanks(std::span<const int> ranks) const {
  return mooncake::nameRanks(ranks, options_.globalRanks);
}

Waiter Group::waiter(Deadline deadline) const {
  const Interrupt& interrupt = bell()->interrupt();
  return {window_->bell(), interrupt, interrupt.generation(), deadline, spin_};
}

void Group::fail(Error why) {
  {
    Lock lock(failureMutex_);
    if (!failure_.ok()) return;
    failure_ = std::move(why);
  }
  failed_.store(true, std::memory_order_release);
  interruptAll();
}

void Group::ring() const { window_->bell().ring(); }

void Group::interruptAll() {
  bell()->interrupt().bump();
  ring();
}

Status Group::usable() const {
  const bool hasFailed = failed_.load(std::memory_order_acquire);
  if (!hasFailed) return membership_->isOver() ? membership_->standing() : Status();
  Lock lock(failureMutex_);
  return failure_;
}

void Group::onView(const GroupView& view) {
  if (options_.onView) options_.onView(view);  // before any message ends by it
  for (int r = 0; r < size(); ++r) isOut_[r].store(!view.contains(r), std::memory_order_release);
}

void Group::watchReconnects(std::function<void(int)> watcher) {
  Lock lock(reconnectMutex_);
  onReconnected_ = std::move(watcher);
}

void Group::onReconnected(int rank) {
  Lock lock(reconnectMutex_);
  if (onReconnected_) onReconnected_(rank);
}

void Group::onSeriesEnd(const SeriesClose& close) {
  if (options_.onSeriesEnd) options_.onSeriesEnd(close);
}

bool Group::isGone(int rank) const { return window_->disconnection(rank) || isOut(rank); }

std::string Group::whyGone(int rank) const {
  if (const Evidence* seen = window_->disconnection(rank))
    return seen->isGoodbye() ? "it left the job" : "lost it: " + seen->detail;
  if (!roster_->isHeld(jobRanksOf(options_)[size_t(rank)])) return "it is not in the group";
  return isOut(rank) ? "the others go on without it" : "it has left the group";
}

std::atomic<uint64_t>& Group::endedWord(int rank) const {
  return *reinterpret_cast<std::atomic<uint64_t>*>(window_->peerPtr(rank) + layout_.ended());
}

std::atomic<uint64_t>* Group::endedWordOf(int rank) const {
  return window_->peerPtr(rank) ? &endedWord(rank) : nullptr;
}

std::optional<SlotCopy> Group::copyPart(uint64_t number, int of) const {
  const std::byte* part = window_->peerPtr(of);
  const auto& slot = *reinterpret_cast<const Slot*>(
      part ? part + layout_.ownSlot(number) : window_->local() + layout_.inboxSlot(of, number));
  const uint64_t stamp = slot.begun.load(std::memory_order_acquire);
  const uint64_t payloadBytes = slot.payloadBytes;
  if (stampNumber(stamp) != number || payloadBytes > slotBytes_) return std::nullopt;
  // A rank that is behind in a split operation has published `done`, else no rank could have ended
  // it. So it has all payloads that were for it, and has no use for payloads for us.
  if (slot.isSplit) return std::nullopt;
  constexpr size_t kStampEnd = offsetof(Slot, begun) + sizeof(Slot::begun);
  const auto* data = reinterpret_cast<const std::byte*>(&slot) + kStampEnd;
  return SlotCopy{.stamp = stamp,
                  .offset = layout_.inboxSlot(of, number),
                  .data = Bytes(data, data + kSlotHeaderBytes - kStampEnd + payloadBytes)};
}

void Group::putPart(const SlotCopy& copy, int to) const {
  constexpr size_t kStampEnd = offsetof(Slot, begun) + sizeof(Slot::begun);
  // A rank that cannot be reached asks again in the next flush, or is soon out of the view.
  (void)window_->place(to, copy.offset + kStampEnd, copy.data,
                       {.offset = copy.offset + offsetof(Slot, begun), .stamp = copy.stamp});
}

void Group::leave(Deadline deadline) { agent_->leave(lastNumber, deadline); }

void Group::awaitEnded(Deadline deadline) { agent_->awaitEnded(lastNumber, deadline); }

Result<RetiredMemory> Group::allocate(size_t bytes) const {
  auto block = engine().allocate(bytes);
  if (!block.ok()) return block.error();
  const uint32_t byCards = usesCards_ ? kLasting | kLanding : 0;
  auto region = engine().regions().add(block->data(), block->bytes(), kRemoteRead | byCards);
  if (!region.ok()) return region.error();
  return RetiredMemory{.block = std::move(*block), .region = std::move(*region)};
}

Result<Group::Shared> Group::reserve(size_t bytes) {
  auto memory = allocate(bytes);
  if (!memory.ok()) return memory.error();
  const RetiredMemory& kept = reserved_.emplace_back(std::move(*memory));
  return Shared{kept.block.data(), kept.region.remote(), kept.block.offset()};
}

Result<Group::Shared> Group::shared(size_t bytes) {
  if (shared_.block.bytes() < bytes) {
    if (usesCards_) {
      reserved_.push_back(std::move(shared_));  // kept, as outgrown_ is
    } else {
      shared_ = {};
    }
    auto memory = allocate(std::bit_ceil(bytes));
    if (!memory.ok()) return memory.error();
    shared_ = std::move(*memory);
  }
  return Shared{shared_.block.data(), shared_.region.remote(), shared_.block.offset()};
}

std::span<const std::byte*> Group::sources() { return sources_; }
Result<std::byte*> Group::undo(size_t bytes) { return atLeast(undo_, bytes, kLasting); }
Result<std::byte*> Group::scratch(size_t bytes) {
  return atLeast(scratch_, bytes, kLasting | kLanding);
}

Result<std::byte*> Group::atLeast(PrivateBlock& block, size_t wanted, uint32_t rights) {
  if (block.bytes >= wanted) return block.data.get();
  constexpr size_t kLeast = 4096, kLeastByCards = size_t(1) << 20;
  const size_t rounded = std::bit_ceil(std::max(wanted, usesCards_ ? kLeastByCards : kLeast));
  PrivateBlock larger;
  larger.data = {static_cast<std::byte*>(std::aligned_alloc(4096, rounded)), std::free};
  if (!larger.data)
    return Error{ErrorCode::kExhausted,
                 "no memory for " + std::to_string(rounded) + " bytes of staging"};
  larger.bytes = rounded;
  if (usesCards_) {
    auto region = engine().regions().add(larger.data.get(), rounded, rights);
    if (!region.ok()) return region.error();
    larger.region = std::move(*region);
    outgrown_.push_back(std::move(block));
  }
  block = std::move(larger);
  return block.data.get();
}

}  // namespace mooncake
