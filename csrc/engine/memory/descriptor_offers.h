#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>

#include "base/bytes.h"
#include "base/deadline.h"
#include "base/event_loop.h"
#include "base/fd.h"
#include "base/mutex.h"
#include "base/result.h"
#include "device/device_types.h"

// Descriptors of shared memory (PeerMemory), for processes of the host that map it. Wire form, over a
// unix socket in the abstract namespace. All that a stranger costs us is a connection:
//   handle:  32 bytes secret  string name of the socket (the rest)
//   request: 32 bytes secret  u64 number of the offer
//   answer:  u8 1, with the descriptor; or the end of the connection
namespace mooncake {

// The owner's side. Ends when the loop has stopped.
class DescriptorOffers {
 public:
  // Connections at a time. Beyond these, the oldest is dropped.
  static constexpr size_t kMostGuests = 64;

  static Result<std::unique_ptr<DescriptorOffers>> start(EventLoop& loop);
  ~DescriptorOffers();
  DescriptorOffers(const DescriptorOffers&) = delete;
  DescriptorOffers& operator=(const DescriptorOffers&) = delete;

  // Returns the handle for ExportedMemory, of all offers.
  const std::string& handle() const { return handle_; }
  // Offers a descriptor for as long as this object lives. Returns its number. Any thread.
  uint64_t add(Fd descriptor);

 private:
  struct Guest {
    Fd socket;
    Bytes request;
  };

  explicit DescriptorOffers(EventLoop& loop) : loop_(loop) {}
  void onConnection();
  void pause();
  void onGuest(uint64_t number);
  bool answer(Guest& guest) EXCLUDES(mutex_);
  void drop(uint64_t number);

  EventLoop& loop_;
  Fd listener_;
  std::string handle_;
  // Used on the loop's thread only.
  std::map<uint64_t, Guest> guests_;  // in the order of their coming
  uint64_t lastGuest_ = 0;
  Mutex mutex_;
  std::map<uint64_t, Fd> offers_ GUARDED_BY(mutex_);
  uint64_t lastOffer_ GUARDED_BY(mutex_) = 0;
};

// Asks the owner of offered memory for its descriptor. On the loop's thread, as `done`, which runs
// once, perhaps before this returns. kTimeout: the owner has not answered, perhaps because it is
// stopped. Other errors: the offer does not exist any more.
void requestDescriptor(EventLoop& loop, const ExportedMemory& memory, Deadline deadline,
                       std::function<void(Result<Fd>)> done);

}  // namespace mooncake
