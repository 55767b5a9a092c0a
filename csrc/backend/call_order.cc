#include "backend/call_order.h"

#include <exception>
#include <string>
#include <utility>

namespace mooncake {

void CallOrder::use(std::unique_ptr<Replays> replays) {
  own_ = std::move(replays);
  replays_ = own_.get();
}

void CallOrder::drop() {
  replays_ = nullptr;
  own_.reset();
}

void CallOrder::follow(const GroupLine& line, std::shared_ptr<CollectiveQueue> queue,
                       c10::intrusive_ptr<CollectiveWork> work, const std::function<void()>& mark,
                       CollectiveQueue::Run run) {
  Replays& replays = *replays_;
  uint32_t number = 0;
  try {
    number = replays.announce();
  } catch (const std::exception& error) {
    // The other ranks run the operation.
    line.current()->fail(
        {ErrorCode::kSystem,
         std::string("a call could not be put in order with graphs: ") + error.what()});
    throw;
  }
  try {
    if (mark) mark();
  } catch (...) {
    replays.skip();
    throw;
  }
  replays.follow(
      number, [queue = std::move(queue), work = std::move(work), run = std::move(run)]() mutable {
        queue->submit(work, /*async=*/false, std::move(run));
      });
}

}  // namespace mooncake
