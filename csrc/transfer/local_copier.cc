#include "transfer/local_copier.h"

#include <algorithm>
#include <string>

#include "engine/memory/program_memory.h"

namespace mooncake::transfer {

LocalCopier::~LocalCopier() {
  for (const Stream& one : idle_) one.owner.accelerator->giveBackStream(one.stream);
}

Status LocalCopier::copy(const LocalMemory& to, const LocalMemory& from, size_t bytes) {
  const Error notMapped{ErrorCode::kInvalidArgument,
                        "memory of this process that is registered is not mapped, or must not be "
                        "written. Unregister memory before it is freed"};
  const MemoryOwner& owner = from.owner ? from.owner : to.owner;
  if (!owner) return copyIfMapped(to.data, from.data, bytes) ? Status() : notMapped;
  if ((!to.owner && !isMapped(to.data, bytes)) || (!from.owner && !isMapped(from.data, bytes)))
    return notMapped;
  if (to.owner && to.owner.accelerator != owner.accelerator) {
    return {ErrorCode::kUnsupported, std::string("no accelerator copies from a device of ") +
                                         owner.accelerator->name() + " to one of " +
                                         to.owner.accelerator->name()};
  }
  const auto stream = take(owner);
  if (!stream.ok()) return stream.status();
  Status copied = owner.accelerator->copy(*stream, to.data, from.data, bytes);
  // Also after an error: a part of the copy may be under way.
  const Status over = owner.accelerator->synchronize(*stream);
  giveBack(owner, *stream);
  return copied.ok() ? over : copied;
}

Result<DeviceStream> LocalCopier::take(const MemoryOwner& owner) {
  {
    std::lock_guard lock(mutex_);
    const auto found = std::find_if(idle_.begin(), idle_.end(),
                                    [&](const Stream& one) { return one.owner == owner; });
    if (found != idle_.end()) {
      const DeviceStream stream = found->stream;
      idle_.erase(found);
      return stream;
    }
  }
  return owner.accelerator->takePromptStream(owner.device);
}

void LocalCopier::giveBack(const MemoryOwner& owner, DeviceStream stream) {
  std::lock_guard lock(mutex_);
  idle_.push_back({owner, stream});
}

}  // namespace mooncake::transfer
