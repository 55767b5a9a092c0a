#include "backend/message_memory.h"

#include <exception>
#include <utility>

#include "base/log.h"

namespace mooncake {

MessageMemory::~MessageMemory() {
  if (!tensor_.defined()) return;
  using Tensors = std::pair<at::Tensor, Flat>;
  auto* const tensors = new Tensors(std::move(tensor_), std::move(flat_));
  try {
    completions_->post([tensors] { delete tensors; });
  } catch (const std::exception& error) {
    log(LogLevel::kError, "messages",
        "the tensor of a message stays until the process ends: ", error.what());
  }
}

void MessageMemory::clear() const {
  if (!tensor_.is_cpu()) return;
  const PlainWrites plain(tensor_);
  tensor_.zero_();
}

void MessageMemory::drop() {
  flat_ = Flat(at::Tensor(), at::Tensor());
  tensor_ = at::Tensor();
}

}  // namespace mooncake
