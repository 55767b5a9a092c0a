#pragma once

#include <memory>
#include <span>

#include "backend/completions.h"
#include "backend/tensors.h"

namespace mooncake {

// Tensors of one message. The message holds them until it ends, its MessageWork until the caller
// drops the work. So the memory lasts as long as either needs it.
class MessageMemory {
 public:
  MessageMemory(at::Tensor tensor, std::shared_ptr<Completions> completions)
      : tensor_(std::move(tensor)), flat_(tensor_), completions_(std::move(completions)) {}
  // The last holder may be a thread of the core with locks held, and the end of a tensor may wait
  // for Python's lock: the completion thread drops the tensors, unless drop() did.
  ~MessageMemory();

  std::span<std::byte> bytes() const { return flat_.bytes(); }  // data of a send
  std::span<std::byte> place() const { return flat_.place(); }  // room for a receive
  const at::Tensor& tensor() const { return tensor_; }
  // True: the bytes are in a buffer beside the tensor, and a receive copies them back.
  bool isCopy() const { return flat_.isCopy(); }
  void copyBack() const { flat_.copyBack(); }
  // Fills the tensor with zeros, unless it is a device's: its MessageStaging does that in the order of
  // a stream.
  void clear() const;
  // Drops the tensors on this thread, which may wait for Python's lock. For the only holder.
  void drop();

 private:
  at::Tensor tensor_;
  Flat flat_;
  const std::shared_ptr<Completions> completions_;
};

}  // namespace mooncake
