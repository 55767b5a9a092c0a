#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "base/result.h"
#include "device/fake/fake_stream.h"

namespace mooncake {

// Work of streams that is recorded and not run. The owner's lock guards it.
class FakeCapture {
 public:
  // A place in the graph for work. Each replay asks it for the task to run.
  using Node = std::function<FakeStream::Task()>;
  // Number of each stream's nodes that come before a point in the graph.
  using Place = std::map<const FakeStream*, size_t>;

  explicit FakeCapture(const FakeStream& origin) : origin_(&origin) { places_[origin_]; }

  bool beganOn(const FakeStream& stream) const { return &stream == origin_; }
  void add(const FakeStream& stream, Node node);
  // Returns the point behind the stream's last node.
  Place placeOf(const FakeStream& stream) const { return places_.at(&stream); }
  // The stream's next nodes come after `place`. The stream joins if it was not in.
  void join(const FakeStream& stream, const Place& place);
  // check() fails with the first reason.
  void spoil(std::string reason);
  // Fails if the capture is spoiled, or if work of a stream that joined does not come before the end
  // of the stream that began.
  Status check() const;
  // Returns the nodes in the order of the calls.
  std::vector<Node> takeNodes() { return std::move(nodes_); }

 private:
  const FakeStream* const origin_;
  std::map<const FakeStream*, Place> places_;
  std::vector<Node> nodes_;
  std::string spoiled_;
};

}  // namespace mooncake
