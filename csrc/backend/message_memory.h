#pragma once

#include <memory>
#include <span>

#include "backend/completions.h"
#include "backend/tensors.h"

namespace mooncake {

// Tensors of one message. The message holds them until it ends, its MessageWork until the caller
// drops that. So the memory lasts whatever the caller forgets first.
class MessageMemory {
 public:
  MessageMemory(at::Tensor tensor, std::shared_ptr<Completions> completions)
      : tensor_(std::move(tensor)), flat_(tensor_), completions_(std::move(completions)) {}
  // The last holder may be a thread of the core with locks held, and the end of a tensor may wait
  // for Python's lock: the completion thread drops the tensors, unless drop() did.
  ~MessageMemory();

  std::span<std::byte> bytes() const { return flat_.bytes(); }  // of what is sent
  std::span<std::byte> place() const { return flat_.place(); }  // for what is received
  const at::Tensor& tensor() const { return tensor_; }
  // The bytes stand in a buffer of their own: a receive copies them back.
  bool isCopy() const { return flat_.isCopy(); }
  void copyBack() const { flat_.copyBack(); }
  // Fills the tensor with zeros.
  void clear() const;
  // Drops the tensors on this thread, which may wait for Python's lock. For the only holder.
  void drop();

 private:
  at::Tensor tensor_;
  Flat flat_;
  const std::shared_ptr<Completions> completions_;
};

}  // namespace mooncake
