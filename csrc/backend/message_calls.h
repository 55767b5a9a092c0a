#pragma once

#include <memory>
#include <vector>

#include "backend/coalescing.h"
#include "backend/live_group.h"
#include "backend/message_copies.h"
#include "backend/message_memory.h"
#include "backend/message_work.h"

namespace mooncake {

// Checks the messages of a group and posts them, or keeps them for the end of their batch. Throws.
class MessageCalls {
 public:
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  explicit MessageCalls(LiveGroup& group) : group_(group) {}

  // Throws the error of send() or recv() for these arguments, if they are wrong on any device.
  void check(c10d::OpType type, const std::vector<at::Tensor>& tensors, int peer, int tag) const;
  // `copies`: of a tensor of a device, whose copy stands for it in `tensors`; null: there is none.
  WorkPtr post(c10d::OpType type, const std::vector<at::Tensor>& tensors, int peer, int tag,
               const std::shared_ptr<MessageCopies>& copies = nullptr);
  // Ends the calling thread's batch: posts its messages together, and returns one work for all its
  // calls. Raises the first error of the calls.
  WorkPtr endBatch();

  std::shared_ptr<MessageMemory> memoryOf(const at::Tensor& tensor) const;
  // Returns the function that tells the completion hooks of a message's end. Null without hooks, so
  // that such a message costs nothing. `key`: of its work.
  PointToPoint::OnDone tellingOf(uint64_t key) const;

 private:
  c10::intrusive_ptr<MessageWork> start(c10d::OpType type, std::shared_ptr<MessageMemory> memory,
                                        int peer, int tag,
                                        const std::shared_ptr<MessageCopies>& copies);
  void settleWhenFinished(const c10::intrusive_ptr<MessageWork>& work,
                          const std::shared_ptr<MessageCopies>& copies);

  LiveGroup& group_;
};

}  // namespace mooncake
