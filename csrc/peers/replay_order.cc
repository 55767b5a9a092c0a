#include "peers/replay_order.h"

namespace mooncake {

Status ReplayOrder::beforeGraph(DeviceStream recorded) {
  if (!event_) {
    auto made = accelerator_.createEvent(calls_.device);
    if (!made.ok()) return made.error();
    auto* const event = dynamic_cast<ReplayEvent*>(made->get());
    if (!event) return {ErrorCode::kUnsupported, "graphs of this device cannot have an order"};
    MOONCAKE_TRY(event->record(calls_));  // the calls so far
    (void)made->release();
    event_.reset(event);
  }
  return event_->blockInReplays(recorded);
}

}  // namespace mooncake
