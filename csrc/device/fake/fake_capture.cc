#include "device/fake/fake_capture.h"

#include <algorithm>
#include <utility>

namespace mooncake {

void FakeCapture::add(const FakeStream& stream, FakeStream::Task task) {
  ++places_[&stream][&stream];
  tasks_.push_back(std::move(task));
}

void FakeCapture::join(const FakeStream& stream, const Place& place) {
  Place& own = places_[&stream];
  for (const auto& [other, tasks] : place) own[other] = std::max(own[other], tasks);
}

void FakeCapture::spoil(std::string reason) {
  if (spoiled_.empty()) spoiled_ = std::move(reason);
}

Status FakeCapture::check() const {
  if (!spoiled_.empty())
    return {ErrorCode::kInvalidArgument, "the capture is not valid: " + spoiled_};
  const auto tasksOf = [](const Place& place, const FakeStream* stream) {
    const auto found = place.find(stream);
    return found == place.end() ? 0 : found->second;
  };
  for (const auto& [stream, place] : places_) {
    if (tasksOf(places_.at(origin_), stream) == tasksOf(place, stream)) continue;
    return {ErrorCode::kInvalidArgument,
            stream->name() + " has joined the capture, and " + origin_->name() +
                " does not wait for its last work. Record an event there and block on it"};
  }
  return {};
}

}  // namespace mooncake
