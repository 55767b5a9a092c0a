#include "collectives/group.h"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <sys/mman.h>

#include "collectives/mailbox.h"
#include "engine/rendezvous/address_book.h"

namespace mooncake {
namespace {

// What a member publishes:  u32 version  bytes endpoint (route.cc)  bytes window part (window.cc)
// The version covers all that ranks say to each other afterwards: slots, mailboxes and stamps too.
constexpr uint32_t kMemberVersion = 1;

// Up to 64 KiB one exchange of slots beats a second round of signals even with eight ranks on two
// cores. A slot holds four times that, for operations in which only one rank sends over messages;
// less in large groups, so that the inboxes of a rank stay below 64 MiB of address space.
constexpr size_t kEagerBytes = 64 << 10;
constexpr size_t kSlotBytes = 256 << 10;
constexpr size_t kInboxBudget = 64 << 20;
constexpr size_t kLeastEagerBytes = 4 << 10;
constexpr auto kLook = std::chrono::milliseconds(1);
constexpr size_t kTableBytesPerRank =
    64;  // alltoall's table of splits and regions must fit in any case

size_t chooseSlotBytes(const Env& env, int size) {
  const size_t wanted =
      env.eagerBytes ? env.eagerBytes
                     : std::bit_floor(std::min(kInboxBudget / (2 * size_t(size)), kSlotBytes));
  return std::max(wanted, kLeastEagerBytes + kTableBytesPerRank * size_t(size));
}

}  // namespace

Result<std::unique_ptr<Group>> Group::create(std::shared_ptr<Engine> engine, Store& store,
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
                         .take();
  auto all = exchange(store, "members", rank, size, mine, deadline);
  if (!all.ok()) return all.error();
  std::vector<Bytes> endpoints, parts;
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
    MOONCAKE_TRY(in.finish("address of rank " + std::to_string(r)));
    endpoints.emplace_back(endpoint.begin(), endpoint.end());
    parts.emplace_back(part.begin(), part.end());
  }
  auto peers = engine->connect(endpoints, deadline);
  if (!peers.ok()) return peers.error();
  MOONCAKE_TRY(group->window_->attach(rank, std::move(*peers), parts));

  int onHost = 0;
  for (int r = 0; r < size; ++r) onHost += group->window_->peerPtr(r) != nullptr;
  group->sources_.resize(size);
  group->spin_ = group->window_->fullyMapped() ? SpinPolicy::forRanksOnHost(onHost)
                                               : SpinPolicy::forMessages();
  group->isCrowded_ = group->window_->fullyMapped() && group->spin_.pauses == 0;
  engine->watch(&group->interrupt_, &group->window_->bell());
  return group;
}

// Peers may be later than we are: our memory goes when all that map it have left, too, or are gone.
// Whoever has left reads nothing of ours any more, and we wrote to its part for the last time
// before we left.
Group::~Group() {
  if (!window_) return;
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
  interrupt_.bump();
  window_->bell().ring();
}

Status Group::usable() const {
  // Nobody has ever failed: the generation says so without a lock.
  if (interrupt_.generation() == 0) return {};
  std::lock_guard lock(failureMutex_);
  return failure_;
}

void Group::leave(Deadline deadline) {
  for (int r = 0; r < size(); ++r) {
    const std::byte* part = window_->peerPtr(r);
    if (!part || r == rank()) continue;
    const auto& ended = *reinterpret_cast<const std::atomic<uint64_t>*>(part + layout_.ended());
    const auto done = [&] {
      return ended.load(std::memory_order_acquire) >= lastNumber || window_->ended(r);
    };
    // Nobody rings for this: look again now and then.
    while (!done() && !deadline.passed()) {
      Waiter slice = waiter(deadline.earlier(Deadline::after(kLook)));
      (void)slice.until(done);
    }
  }
}

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
