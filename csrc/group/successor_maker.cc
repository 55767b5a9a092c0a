#include "group/successor_maker.h"

#include <utility>

#include "base/thread.h"

namespace mooncake {

Result<std::shared_ptr<SuccessorMaker>> SuccessorMaker::start(
    std::function<void(const StopSignal& stop)> make) {
  auto stop = StopSignal::make();
  if (!stop.ok()) return stop.error();
  std::shared_ptr<SuccessorMaker> maker(new SuccessorMaker(std::move(*stop)));
  auto thread = startThread("mooncake-next",
                            [&signal = *maker->stop_, make = std::move(make)] { make(signal); });
  if (!thread.ok()) return thread.error();
  maker->thread_ = std::move(*thread);
  return maker;
}

SuccessorMaker::~SuccessorMaker() {
  stop_->stop();
  if (thread_.joinable()) thread_.join();
}

}  // namespace mooncake
