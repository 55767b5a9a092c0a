#pragma once

#include <chrono>
#include <memory>

#include "backend/device/recorded_calls.h"
#include "backend/device/staging.h"

namespace mooncake {

// An operation that is recorded into a graph, for all replays of it: see ReplayStaging. mark()
// records the copies, and words by which a replay tells the host that its inputs are there and waits
// for its outputs. It keeps no tensor of the device: the memory of a graph stays at its place.
class GraphStaging final : public Staging {
 public:
  // `calls` outlives the staging.
  GraphStaging(const std::shared_ptr<GroupStreams>& streams, RecordedCalls& calls,
               std::chrono::milliseconds limit)
      : Staging(streams, calls.stream(), limit), calls_(calls) {}

  // On a stream that is recorded.
  void mark() override;
  Mode mode() const override { return Mode::kRecords; }
  bool isOrdered() const override { return true; }
  const RecordedCalls::Place& place() const { return place_; }

  // For a replay that waits at the operation. Each waits on the host.
  Status awaitInput(Group& group, size_t bytes) const override;
  Status fetchAgain(Group& group) override;
  // Copies the inputs again if copies of an operation that has ended may have come on them.
  Status fetchAfterLateCopies(Group& group);
  // Replaces the results in host memory by the outputs' present contents. If the device fails, they
  // are undefined.
  void restoreOutputs() const;
  // Lets the replay go on, which copies the outputs.
  void release() const { place_.words->release(place_.number); }

  // The rest is for calls that are not recorded.
  Status fetch(Group&) override { return {}; }
  void giveBack() override {}
  void abandon() override {}
  bool isOver() const override { return true; }
  void block() override {}
  void synchronize() const override {}

 protected:
  at::Tensor emptyOnHost(const at::Tensor& tensor) override;
  void onPiece(const c10::Stream& stream) override;

 private:
  void record();
  template <typename Enqueue>
  void enqueueCopies(const Enqueue& enqueue) const;
  DeviceStream recorded() const { return OwnStream::nativeOf(stream()); }

  RecordedCalls& calls_;
  GraphMemory::Taken taken_;
  RecordedCalls::Place place_;
  uint32_t pieces_ = 0;  // of a cut input
};

}  // namespace mooncake
