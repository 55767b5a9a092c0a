#include "wires/stream/copy_watch.h"

#include <chrono>
#include <thread>
#include <utility>

namespace mooncake {
namespace {

constexpr auto kFast = std::chrono::microseconds(200);
constexpr auto kPause = std::chrono::milliseconds(1);

}  // namespace

void CopyWatch::lookSoon(std::shared_ptr<const void> owner) {
  if (isDue_.exchange(true)) return;
  auto task = [this, owner = std::move(owner)] { look(); };
  if (isSlow_) {
    loop_.runAt(Deadline::after(kPause), std::move(task));
  } else {
    loop_.post(std::move(task));
  }
}

void CopyWatch::look() {
  isDue_ = false;
  const auto now = Clock::now();
  // A long pause since the last look means that no copy was under way.
  const bool isNew = now - looked_ > kFast && !isSlow_;
  looked_ = now;
  const uint64_t ended = look_();
  if (isNew || std::exchange(ended_, ended) != ended) changed_ = now;
  isSlow_ = now - changed_ > kFast;
  if (!isSlow_) std::this_thread::yield();  // the device may be a thread
}

}  // namespace mooncake
