#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "engine/memory/region_table.h"
#include "wires/cards/control.h"
#include "wires/cards/rails.h"
#include "wires/nic/registrations.h"

namespace mooncake {

// Our end of a channel to a peer that was told keys.
class KeyHolder {
 public:
  virtual ~KeyHolder() = default;
  // The keys of this region that the peer was told are void, or there are more keys: the peer has
  // to ask again. Any thread.
  virtual void onKeysChanged(uint64_t region) = 0;
};

// The long-lived regions of this engine, each registered once with every card, and the holders of
// their keys. Only the owner tells keys, for regions that are in the table and with their rights.
// It takes them back in three cases: the region is revoked, a holder is fenced or begins a new
// connection, or a holder reports that a write of it may land late. A card is closed and opened
// anew if data may still land under a key that is gone, or if an operation of ours still holds the
// registration. Any thread.
class CardMemories final : public RegionWatcher {
 public:
  CardMemories(RegionTable& regions, std::shared_ptr<Rails> rails, const char* name);
  ~CardMemories() override;

  // The registration of one region with one card, in one generation of that card.
  class OnCard {
   public:
    OnCard(std::shared_ptr<Nic> nic, uint64_t generation)
        : nic_(std::move(nic)), generation_(generation) {}
    ~OnCard();
    OnCard(const OnCard&) = delete;
    OnCard& operator=(const OnCard&) = delete;

    uint64_t generation() const { return generation_; }
    // Null: the card did not accept the region.
    const NicRegistration* memory() const { return memory_.get(); }
    // The registration with keys that also allow a peer to write that was asked to. Null: there is
    // none.
    const NicRegistration* landing() const { return landing_.get(); }

   private:
    friend class CardMemories;
    const std::shared_ptr<Nic> nic_;  // must live longer than the registrations
    const uint64_t generation_;
    std::shared_ptr<const NicRegistration> memory_, landing_;
    const std::shared_ptr<std::atomic<bool>> isGone_ = std::make_shared<std::atomic<bool>>(false);
  };
  // A range here that operations of ours may name. It stays registered while this object lives.
  struct Local {
    RegionTable::Use use;
    uint64_t offset = 0;                               // of the range in the region
    std::vector<std::shared_ptr<const OnCard>> cards;  // null: not registered with this card
  };
  // Returns none if the range is not in a registered region.
  std::optional<Local> find(std::span<const std::byte> range) EXCLUDES(mutex_);
  // A range here into which a peer may be asked to write, as the peer names it.
  struct Landing {
    uint64_t key = 0, offset = 0;
  };
  std::optional<Landing> landing(std::span<const std::byte> range) EXCLUDES(mutex_);
  // Returns keys of regions with kRemoteWrite, at most this many.
  std::vector<uint64_t> keys(size_t most) EXCLUDES(mutex_);

  // Returns the card keys of a region for a peer, keys with kLanding only if the peer is asked to
  // write there. The peer is a holder from now on, until takeBack() or forget().
  control::Grant grant(uint64_t key, const std::shared_ptr<KeyHolder>& holder, bool isAsked)
      EXCLUDES(mutex_);
  // Takes back all keys of a holder. When it returns, nothing lands or is read under them any more.
  void takeBack(const KeyHolder* holder) EXCLUDES(mutex_);
  // The same, but the peer stays a holder, and hears of new keys.
  void withdraw(const KeyHolder* holder) EXCLUDES(mutex_);
  // Withdraws without waiting. `done` runs on another thread, unless the cards are closed for good.
  void withdrawLater(const KeyHolder* holder, std::function<void()> done) EXCLUDES(mutex_);
  // Forgets a holder that has left in peace, so that none of its operations is under way.
  void forget(const KeyHolder* holder) EXCLUDES(mutex_);
  // Takes back the keys of one region for one card. `done` runs on another thread when no operation
  // that began under earlier keys lands there any more.
  void takeBackLater(uint64_t key, size_t card, const KeyHolder* holder, std::function<void()> done)
      EXCLUDES(mutex_);

  void onAdded(uint64_t key, std::span<std::byte> memory, uint32_t rights) override;
  void onRevoked(uint64_t key) override;
  void onRenewal() { post(nullptr); }

  // Bytes of all channels, for CardCounters.
  std::atomic<uint64_t> read{0}, written{0}, retried{0};

  // Ends all registrations, before the cards are closed for good. Later calls do nothing.
  void stop() EXCLUDES(mutex_);

 private:
  struct Holder {
    std::weak_ptr<KeyHolder> end;
    bool hasKeys = false;
  };
  struct Region {
    std::span<std::byte> memory;
    uint32_t rights = 0;
    std::vector<std::shared_ptr<const OnCard>> cards;
    std::map<const KeyHolder*, Holder> holders;
  };
  // Registrations that were taken out of the table and may still be reached.
  struct Detached {
    struct One {
      Rails::Retired card;
      std::shared_ptr<const OnCard> memory;
      std::shared_ptr<std::atomic<bool>> isGone;
      bool stopsByItself = false;
    };
    uint64_t number = 0;
    std::vector<One> ones;
  };

  std::shared_ptr<const OnCard> registerWith(size_t card, std::span<std::byte> memory,
                                             uint32_t rights) EXCLUDES(mutex_);
  void tellReadBack() EXCLUDES(mutex_);
  bool isStale(const Region& region, size_t card) const;
  const Region* regionOf(std::span<const std::byte> range, uint32_t rights, uint64_t& key) const
      REQUIRES(mutex_);
  Detached begin() REQUIRES(mutex_);
  void detach(Region& region, size_t card, Detached& detached) REQUIRES(mutex_);
  Detached detachAll(const KeyHolder* holder, bool staysHolder) REQUIRES(mutex_);
  void finishLater(Detached detached, std::function<void()> done) REQUIRES(mutex_);
  void finish(Detached detached) EXCLUDES(mutex_);
  void post(std::function<void()> task) EXCLUDES(mutex_);
  void enqueue(std::function<void()> task) REQUIRES(mutex_);
  void run() EXCLUDES(mutex_);
  void refresh() EXCLUDES(mutex_);

  RegionTable& table_;
  const std::shared_ptr<Rails> rails_;
  const char* const name_;

  Mutex mutex_;
  Condition changed_;
  bool isStopped_ GUARDED_BY(mutex_) = false;
  bool hasToldFailure_ GUARDED_BY(mutex_) = false;
  bool hasToldUse_ GUARDED_BY(mutex_) = false;
  bool hasToldReadBack_ GUARDED_BY(mutex_) = false;
  std::map<uint64_t, Region> regions_ GUARDED_BY(mutex_);  // by key
  // Keys; memory may be added twice.
  std::multimap<const std::byte*, uint64_t> byAddress_ GUARDED_BY(mutex_);
  uint64_t lastDetached_ GUARDED_BY(mutex_) = 0;
  std::set<uint64_t> unfinished_ GUARDED_BY(mutex_);  // numbers of Detached
  std::deque<std::function<void()>> tasks_ GUARDED_BY(mutex_);
  // Registers anew, and waits for cards instead of threads that must not wait.
  std::thread thread_;
};

}  // namespace mooncake
