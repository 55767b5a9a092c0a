#include "transfer/local_copy.h"

#include <string>

#include "device/stream_queues.h"
#include "engine/memory/program_memory.h"

namespace mooncake::transfer {

Status copyLocal(const LocalMemory& to, const LocalMemory& from, size_t bytes) {
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
  const auto queues = owner.accelerator->streamQueues(owner.device);
  if (!queues.ok()) return queues.status();
  const DeviceStream stream = (*queues)->prompt();
  Status copied = owner.accelerator->copy(stream, to.data, from.data, bytes);
  // Also after an error: a part of the copy may be under way.
  const Status over = owner.accelerator->synchronize(stream);
  return copied.ok() ? over : copied;
}

}  // namespace mooncake::transfer
