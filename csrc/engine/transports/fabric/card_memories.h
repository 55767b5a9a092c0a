#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "engine/memory/region_table.h"
#include "engine/nic/registrations.h"
#include "engine/transports/fabric/control.h"
#include "engine/transports/fabric/rails.h"

namespace mooncake {

// A peer's end here, which was told keys.
class KeyHolder {
 public:
  virtual ~KeyHolder() = default;
  // What it was told of that region is void, or there is more: the peer asks anew. Any thread.
  virtual void onKeysChanged(uint64_t region) = 0;
};

// What the cards know of this engine's memory: the regions that last, each registered once with all
// cards, and who was told under which keys. Keys are told by the owner, for regions that are there
// and with their rights; they are taken back when the region is revoked, when a holder is fenced or
// begins anew, and when a holder says that something it has written may come late. Where a card
// cannot promise that nothing lands under a key that is gone, or where an operation of ours still
// holds the registration, the card is closed and opened anew. Any thread.
class CardMemories final : public RegionWatcher {
 public:
  CardMemories(RegionTable& regions, std::shared_ptr<Rails> rails, const char* name);
  ~CardMemories() override;

  // One region with one card, as that was opened last.
  class OnCard {
   public:
    OnCard(std::shared_ptr<Nic> nic, uint64_t generation)
        : nic_(std::move(nic)), generation_(generation) {}
    ~OnCard();
    OnCard(const OnCard&) = delete;
    OnCard& operator=(const OnCard&) = delete;

    uint64_t generation() const { return generation_; }
    // Null: the card did not take it.
    const NicRegistration* memory() const { return memory_.get(); }
    // The registration with keys that also allow an asked peer to write. Null: there is none.
    const NicRegistration* landing() const { return landing_.get(); }

   private:
    friend class CardMemories;
    const std::shared_ptr<Nic> nic_;  // there for as long as something is registered with it
    const uint64_t generation_;
    std::shared_ptr<const NicRegistration> memory_, landing_;
    const std::shared_ptr<std::atomic<bool>> isGone_ = std::make_shared<std::atomic<bool>>(false);
  };
  // A range here that operations of ours may name, and what keeps it.
  struct Local {
    RegionTable::Use use;
    uint64_t offset = 0;                               // of the range in the region
    std::vector<std::shared_ptr<const OnCard>> cards;  // null: not with this one
  };
  std::optional<Local> find(std::span<const std::byte> range);
  // A range here into which a peer may be asked to write, as it names it.
  struct Landing {
    uint64_t key = 0, offset = 0;
  };
  std::optional<Landing> landing(std::span<const std::byte> range);
  // Keys of the regions with kRemoteWrite.
  std::vector<uint64_t> keys(size_t most);

  // Returns the keys of a region for a peer, those of kLanding only if the peer is asked to write
  // there. The peer is a holder from now on, until its keys are taken back, or until forget(): it
  // has left in peace, and nothing of it is under way.
  control::Grant grant(uint64_t key, const std::shared_ptr<KeyHolder>& holder, bool isAsked);
  void takeBack(const KeyHolder* holder);
  // The same, but it stays a holder: it hears of new keys when there are some.
  void withdraw(const KeyHolder* holder);
  // That, without waiting: `done` runs on another thread, unless the cards are closed for good.
  void withdrawLater(const KeyHolder* holder, std::function<void()> done);
  void forget(const KeyHolder* holder);
  // Of one region and card. `done` runs on another thread when nothing lands there any more that
  // was begun under a key that anybody was told before.
  void takeBackLater(uint64_t key, size_t card, const KeyHolder* holder,
                     std::function<void()> done);

  void onAdded(uint64_t key, std::span<std::byte> memory, uint32_t rights) override;
  void onRevoked(uint64_t key) override;
  void onRenewal() { post(nullptr); }

  // Of all channels: CardCounters.
  std::atomic<uint64_t> read{0}, written{0}, retried{0};

  // The cards are about to be closed for good: nothing is registered, or taken back, any more.
  void stop();

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
  // What was taken out of the table and may still be reached.
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
                                             uint32_t rights);
  bool isStale(const Region& region, size_t card) const;
  const Region* regionOf(std::span<const std::byte> range, uint32_t rights,
                         uint64_t& key) const;                      // under the lock
  Detached begin();                                                 // under the lock
  void detach(Region& region, size_t card, Detached& detached);     // under the lock
  Detached detachAll(const KeyHolder* holder, bool staysHolder);    // under the lock
  void finishLater(Detached detached, std::function<void()> done);  // under the lock
  void finish(Detached detached);
  void post(std::function<void()> task);
  void enqueue(std::function<void()> task);  // under the lock
  void run();
  void refresh();

  RegionTable& table_;
  const std::shared_ptr<Rails> rails_;
  const char* const name_;

  std::mutex mutex_;  // guards what follows
  std::condition_variable changed_;
  bool isStopped_ = false;
  bool hasToldFailure_ = false, hasToldUse_ = false;
  std::map<uint64_t, Region> regions_;                   // by key
  std::multimap<const std::byte*, uint64_t> byAddress_;  // keys: memory may be added twice
  uint64_t lastDetached_ = 0;
  std::set<uint64_t> unfinished_;  // of those
  std::deque<std::function<void()>> tasks_;
  std::thread thread_;  // registers anew, and waits for cards, for those who must not
};

}  // namespace mooncake
