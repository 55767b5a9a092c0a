#include "collectives/group.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <random>
#include <sys/mman.h>

#include "collectives/collectives.h"
#include "collectives/mailbox.h"
#include "engine/rendezvous/address_book.h"

namespace mooncake {
namespace {

// What a member publishes:
//   u32 version  bytes endpoint (route.cc)  bytes window part (window.cc)  u64 door  bool raises
// The version covers all that ranks say to each other afterwards: slots, mailboxes, stamps and
// messages too. The door of rank 0's is the one that the group uses.
constexpr uint32_t kMemberVersion = 3;

// Up to 64 KiB one exchange of slots beats a second round of signals even with eight ranks on two
// cores. A slot holds four times that, for operations in which only one rank sends over messages;
// less in large groups, so that the inboxes of a rank stay below 64 MiB of address space.
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

size_t chooseSlotBytes(const Env& env, int size) {
  const size_t wanted =
      env.eagerBytes ? env.eagerBytes
                     : std::bit_floor(std::min(kInboxBudget / (2 * size_t(size)), kSlotBytes));
  return std::max(wanted, kLeastEagerBytes + kTableBytesPerRank * size_t(size));
}

}  // namespace

Result<std::unique_ptr<Group>> Group::create(std::shared_ptr<Engine> engine, Store& store,
                                             GroupOptions options, Deadline deadline) {
  const int rank = options.rank;
  auto group = make(std::move(engine), store, std::move(options), deadline);
  if (!group.ok()) return tellFailure(store, rank, group.error());
  return group;
}

Result<std::unique_ptr<Group>> Group::make(std::shared_ptr<Engine> engine, Store& store,
                                           GroupOptions options, Deadline deadline) {
  const int rank = options.rank, size = options.size;
  if (size > kMaxRanks) {
    return Error{ErrorCode::kUnsupported, "a group of " + std::to_string(size) +
                                              " ranks; the most is " + std::to_string(kMaxRanks)};
  }
  const size_t slotBytes = chooseSlotBytes(engine->env(), size);
  const size_t eagerBytes = engine->env().eagerBytes ? slotBytes : std::min(slotBytes, kEagerBytes);
  const PartLayout layout(size, slotBytes, kMailboxBytes);
  std::unique_ptr<Group> group(new Group(std::move(options), layout, slotBytes, eagerBytes));

  auto window = Window::create(engine, layout.bytes());
  if (!window.ok()) return window.error();
  group->window_ = std::move(*window);

  const Bytes mine = ByteWriter()
                         .put(kMemberVersion)
                         .putBytes(engine->endpoint())
                         .putBytes(group->window_->describe())
                         .put(randomNumber())
                         .put(group->options_.raises)
                         .take();
  auto all = exchange(store, "members", rank, size, mine, deadline);
  if (!all.ok()) return all.error();
  std::vector<Bytes> endpoints, parts;
  uint64_t door = 0;
  for (int r = 0; r < size; ++r) {
    ByteReader in((*all)[r]);
    if (const auto version = in.get<uint32_t>(); version != kMemberVersion) {
      return Error{ErrorCode::kMismatch, "rank " + std::to_string(r) + " speaks version " +
                                             std::to_string(version) + " of the protocol, rank " +
                                             std::to_string(rank) + " version " +
                                             std::to_string(kMemberVersion) +
                                             ": install the same mooncake-backend everywhere"};
    }
    const auto endpoint = in.getBytes(64 << 10);
    const auto part = in.getBytes(1 << 10);
    const auto theirDoor = in.get<uint64_t>();
    const bool raises = in.get<bool>();
    MOONCAKE_TRY(in.finish("address of rank " + std::to_string(r)));
    if (raises != group->options_.raises) {
      return Error{ErrorCode::kMismatch, "rank " + std::to_string(r) + " chose on_failure='" +
                                             (raises ? "raise" : "continue") + "', rank " +
                                             std::to_string(rank) +
                                             " the other one: choose the same on all ranks"};
    }
    if (r == 0) door = theirDoor;
    endpoints.emplace_back(endpoint.begin(), endpoint.end());
    parts.emplace_back(part.begin(), part.end());
  }
  auto peers = engine->connect(endpoints, deadline);
  if (!peers.ok()) return peers.error();
  group->membership_ = std::move(group->options_.membership);
  const bool isWholeJob = !group->membership_;
  if (isWholeJob) {
    auto membership = Membership::start(
        engine, {.rank = rank, .peers = *peers, .failureTimeout = engine->env().failureTimeout});
    if (!membership.ok()) return membership.error();
    group->membership_ = std::move(*membership);
  }
  MOONCAKE_TRY(group->window_->attach(rank, std::move(*peers), parts));

  int onHost = 0;
  for (int r = 0; r < size; ++r) onHost += group->window_->peerPtr(r) != nullptr;
  group->sources_.resize(size);
  group->spin_ = group->window_->fullyMapped() ? SpinPolicy::forRanksOnHost(onHost)
                                               : SpinPolicy::forMessages();
  group->isCrowded_ = group->window_->fullyMapped() && group->spin_.pauses == 0;
  group->isOut_ = std::make_unique<std::atomic<bool>[]>(size_t(size));
  // A group that is a job by itself has the job's ranks, whatever its members are called elsewhere.
  std::vector<int> jobRanks;
  if (!isWholeJob) jobRanks = group->options_.globalRanks;
  for (int r = static_cast<int>(jobRanks.size()); r < size; ++r) jobRanks.push_back(r);
  group->agent_ = std::make_shared<FlushAgent>(
      *group, *group->membership_, door, std::move(jobRanks), group->options_.raises, isWholeJob);
  group->onView(*group->agent_->view());
  engine->watch(&group->interrupt_, &group->window_->bell());
  group->agent_->start();
  // The job has begun on all of its ranks, or on none: who dies before is missed by all.
  if (isWholeJob) {
    MOONCAKE_TRY(barrier(*group, deadline));
    group->engine().expectSigns();
  }
  return group;
}

// Peers may be later than we are: our memory goes when all that map it have left, too, or are gone.
// Whoever has left reads nothing of ours any more, and we wrote to its part for the last time
// before we left.
Group::~Group() {
  if (!window_) return;
  if (agent_) agent_->stop();
  engine().unwatch(&interrupt_);
  const auto wordOf = [](std::byte* part, size_t offset) -> std::atomic<uint64_t>& {
    return *reinterpret_cast<std::atomic<uint64_t>*>(part + offset);
  };
  struct Reader {
    std::shared_ptr<Peer> peer;
    size_t left;
  };
  std::vector<Reader> readers;
  for (int r = 0; r < window_->size(); ++r) {
    if (r == rank() || !window_->peerPtr(r)) continue;
    wordOf(window_->peerPtr(r), layout_.left(rank())).store(1, std::memory_order_release);
    readers.push_back({window_->peer(r), layout_.left(r)});
  }
  const auto allLeft = [readers, wordOf, part = window_->local()] {
    return std::all_of(readers.begin(), readers.end(), [&](const Reader& reader) {
      return reader.peer->ended || wordOf(part, reader.left).load(std::memory_order_acquire) != 0;
    });
  };
  const std::shared_ptr<Engine> keep = window_->sharedEngine();
  std::vector<RetiredMemory> memory;
  memory.push_back({std::move(sharedBlock_), std::move(sharedRegion_)});
  memory.push_back(window_->retire());
  keep->retire(std::move(memory), allLeft);
}

std::string Group::nameRank(int rank) const {
  std::string text = "rank " + std::to_string(rank);
  if (!options_.globalRanks.empty() && options_.globalRanks[rank] != rank) {
    text += " (global rank " + std::to_string(options_.globalRanks[rank]) + ")";
  }
  return text;
}

Waiter Group::waiter(Deadline deadline) const {
  return {window_->bell(), interrupt_, interrupt_.generation(), deadline, spin_};
}

void Group::fail(Error why) {
  {
    std::lock_guard lock(failureMutex_);
    if (!failure_.ok()) return;
    failure_ = std::move(why);
  }
  failed_.store(true, std::memory_order_release);
  interruptAll();
}

void Group::interruptAll() {
  interrupt_.bump();
  window_->bell().ring();
}

Status Group::usable() const {
  const bool hasFailed = failed_.load(std::memory_order_acquire);
  if (!hasFailed) return membership_->isOver() ? membership_->standing() : Status();
  std::lock_guard lock(failureMutex_);
  return failure_;
}

void Group::onView(const GroupView& view) {
  for (int r = 0; r < size(); ++r) isOut_[r].store(!view.contains(r), std::memory_order_release);
  if (options_.onView) options_.onView(view);
}

void Group::watchRenewals(std::function<void(int)> watcher) {
  std::lock_guard lock(renewalMutex_);
  onRenewal_ = std::move(watcher);
}

void Group::onRenewed(int rank) {
  std::lock_guard lock(renewalMutex_);
  if (onRenewal_) onRenewal_(rank);
}

bool Group::isGone(int rank) const {
  return window_->ended(rank) || isOut_[rank].load(std::memory_order_acquire);
}

std::string Group::whyGone(int rank) const {
  if (const Evidence* seen = window_->ended(rank))
    return seen->isGoodbye() ? "it left the job" : "lost it: " + seen->detail;
  return isOut_[rank].load(std::memory_order_acquire) ? "the others go on without it"
                                                      : "it has left the group";
}

std::atomic<uint64_t>& Group::endedWord(int rank) const {
  return *reinterpret_cast<std::atomic<uint64_t>*>(window_->peerPtr(rank) + layout_.ended());
}

void Group::passOn(uint64_t number, int of, int to) const {
  const std::byte* part = window_->peerPtr(of);
  const auto& slot = *reinterpret_cast<const Slot*>(
      part ? part + layout_.ownSlot(number) : window_->local() + layout_.inboxSlot(of, number));
  const uint64_t stamp = slot.begun.load(std::memory_order_acquire);
  if (stampNumber(stamp) != number || slot.payloadBytes > slotBytes_) return;
  constexpr size_t kStampEnd = offsetof(Slot, begun) + sizeof(Slot::begun);
  const size_t there = layout_.inboxSlot(of, number);
  const std::span<const std::byte> data(reinterpret_cast<const std::byte*>(&slot) + kStampEnd,
                                        kSlotHeaderBytes - kStampEnd + slot.payloadBytes);
  // Who cannot be reached asks again in the next flush, or is out.
  (void)window_->place(to, there + kStampEnd, data,
                       {.offset = there + offsetof(Slot, begun), .stamp = stamp});
}

void Group::leave(Deadline deadline) { agent_->leave(lastNumber, deadline); }

Result<Group::Shared> Group::shared(size_t bytes) {
  if (sharedBlock_.bytes() < bytes) {
    sharedRegion_ = MemoryRegion();
    sharedBlock_ = ArenaBlock();
    auto block = engine().arena().allocate(std::bit_ceil(bytes));
    if (!block.ok()) return block.error();
    auto region = engine().regions().add(block->data(), block->bytes(), kRemoteRead);
    if (!region.ok()) return region.error();
    sharedBlock_ = std::move(*block);
    sharedRegion_ = std::move(*region);
  }
  return Shared{sharedBlock_.data(), sharedRegion_.remote()};
}

std::span<const std::byte*> Group::sources() { return sources_; }
Result<std::byte*> Group::undo(size_t bytes) { return undo_.atLeast(bytes); }
Result<std::byte*> Group::scratch(size_t bytes) { return scratch_.atLeast(bytes); }

Result<std::byte*> Group::PrivateBlock::atLeast(size_t wanted) {
  if (bytes < wanted) {
    const size_t rounded = std::bit_ceil(std::max<size_t>(wanted, 4096));
    data = {static_cast<std::byte*>(std::aligned_alloc(4096, rounded)), std::free};
    bytes = data ? rounded : 0;
    if (!data)
      return Error{ErrorCode::kExhausted,
                   "no memory for " + std::to_string(rounded) + " bytes of staging"};
  }
  return data.get();
}

}  // namespace mooncake
