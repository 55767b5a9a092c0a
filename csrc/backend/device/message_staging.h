#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>

#include "backend/device/group_streams.h"
#include "backend/device/peer_messages.h"
#include "backend/device/staging.h"
#include "backend/device/wait_words.h"
#include "backend/message_copies.h"
#include "base/mutex.h"

namespace mooncake {

// A message on tensors of a device. The copy of a send is enqueued at the call, and the message goes
// when it is there. That of a receive is enqueued when the message has come. If the caller's stream
// is to wait before that, it waits for a word of the host, and does the copy itself. So no other
// stream stands between the two, and a message never waits for one that the program waits for later.
//
// The copy may be in memory of the device (PeerMessages), in place of the host's: the streams do not
// care. It is not the tensor itself, because that keeps its contents if the message fails.
class MessageStaging final : public Staging, public MessageCopies {
 public:
  MessageStaging(std::shared_ptr<GroupStreams> streams, const c10::Stream& callers,
                 std::chrono::milliseconds limit);
  ~MessageStaging() override;

  // Finds memory of the device for the copy of a tensor; nullopt: the copy is in host memory. To be
  // set before the copies are made.
  using Find = std::function<std::optional<PeerMessages::Place>(const at::Tensor& tensor)>;
  void preferDevice(Find find) { find_ = std::move(find); }
  const MessageDevice& device() const override { return device_; }
  void watch(c10::intrusive_ptr<MessageWork> work) override;
  Result<bool> hasData() const override;

  // Enqueues the copy of a send.
  void mark() override;
  bool isOrdered() const override { return false; }
  Status fetch(Group& group) override;
  void giveBack() override;
  // If the caller's stream waits already, the tensor keeps its contents by a rescue: see Rescues.
  void abandon() override;
  void settle() override;
  void release() override;
  bool isOver() const override;
  bool canBlockEarly() const override { return hasOutputs() ? mayWait_ : hasWords_; }
  void block() override;
  void synchronize() const override;

 protected:
  at::Tensor emptyOnHost(const at::Tensor& tensor) override;

 private:
  void blockEarly() REQUIRES(mutex_);
  // Has the copy filled when the caller's stream has come to the wait, and the stream released then.
  // `clears`: with zeros, else with the tensor's present contents.
  void rescue(bool clears) REQUIRES(mutex_);

  const bool hasWords_;
  const bool mayWait_;  // the caller's stream, for a word
  Find find_;
  MessageDevice device_;
  // Events are none in the destructor: see ~Staging().
  std::optional<c10::Event> copied_;  // of a send; recorded before the message is posted
  mutable Mutex mutex_;
  c10::intrusive_ptr<MessageWork> work_ GUARDED_BY(mutex_);
  bool isEnded_ GUARDED_BY(mutex_) = false;     // given back or abandoned
  bool isRescued_ GUARDED_BY(mutex_) = false;   // only the rescue releases the caller's stream
  bool isEnqueued_ GUARDED_BY(mutex_) = false;  // the copy of a receive
  // The caller's stream waits for it, or has done so.
  std::optional<WaitWords::Place> place_ GUARDED_BY(mutex_);
  std::optional<c10::Event> done_ GUARDED_BY(mutex_);        // of a receive
  std::optional<c10::Event> beforeWait_ GUARDED_BY(mutex_);  // of the caller's stream
};

}  // namespace mooncake
