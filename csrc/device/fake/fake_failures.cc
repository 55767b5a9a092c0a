#include "device/fake/fake_failures.h"

#include <algorithm>
#include <array>
#include <string>
#include <utility>

namespace mooncake {
namespace {

constexpr std::array<std::string_view, 32> kCalls = {
    "describe",        "placeOf",        "allocatePinned", "createStream", "synchronize",
    "createEvent",     "record",         "block",          "hasHappened",  "copy",
    "recordInReplays", "blockInReplays", "writeWord",      "awaitWord",    "isCapturing",
    "prepareKernels",  "roomFor",        "launch",         "exportMemory", "importMemory",
    "closeMemory",     "checkSharing",   "allocateShared", "mapShared",    "unmapShared",
    "mapForHost",      "canAccessPeer",  "enqueue",        "allocate",     "beginCapture",
    "endCapture",      "replay",
};

}  // namespace

Status FakeFailures::add(FakeFailure failure) {
  if (std::ranges::find(kCalls, failure.call) == kCalls.end())
    return {ErrorCode::kInvalidArgument, "no function that can fail is called " + failure.call};
  if (failure.n == 0 || failure.times == 0)
    return {ErrorCode::kInvalidArgument, "calls are counted from 1, and at least one fails"};
  Lock lock(mutex_);
  failures_.push_back(std::move(failure));
  return {};
}

Status FakeFailures::count(std::string_view call) {
  Status failed;
  std::vector<std::function<void()>> blocks;
  Lock lock(mutex_);
  for (FakeFailure& failure : failures_) {
    if (failure.call != call) continue;
    if (failure.n > 1) {
      --failure.n;
      continue;
    }
    if (failure.times == 0) continue;
    --failure.times;
    if (failure.block) {
      blocks.push_back(failure.block);
      continue;
    }
    failed = {failure.code, "fake " + failure.call + ": fails because a test injected it"};
  }
  std::erase_if(failures_, [](const FakeFailure& failure) { return failure.times == 0; });
  lock.unlock();
  for (const auto& block : blocks) block();
  return failed;
}

}  // namespace mooncake
