#include "device/fake/fake_capture.h"

#include <algorithm>
#include <utility>

namespace mooncake {

void FakeCapture::add(const FakeStream& stream, Node node) {
  ++places_[&stream][&stream];
  nodes_.push_back(std::move(node));
}

void FakeCapture::join(const FakeStream& stream, const Place& place) {
  Place& own = places_[&stream];
  for (const auto& [other, nodes] : place) own[other] = std::max(own[other], nodes);
}

void FakeCapture::spoil(std::string reason) {
  if (spoiled_.empty()) spoiled_ = std::move(reason);
}

Status FakeCapture::check() const {
  if (!spoiled_.empty())
    return {ErrorCode::kInvalidArgument, "the capture is not valid: " + spoiled_};
  const auto nodesOf = [](const Place& place, const FakeStream* stream) {
    const auto found = place.find(stream);
    return found == place.end() ? 0 : found->second;
  };
  for (const auto& [stream, place] : places_) {
    if (nodesOf(places_.at(origin_), stream) == nodesOf(place, stream)) continue;
    return {ErrorCode::kInvalidArgument,
            stream->name() + " has joined the capture, and " + origin_->name() +
                " does not wait for its last work. Record an event there and block on it"};
  }
  return {};
}

}  // namespace mooncake
