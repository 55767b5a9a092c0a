#include "backend/device/replay_staging.h"

#include <utility>

#include "base/failpoint.h"

namespace mooncake {

ReplayStaging::ReplayStaging(std::shared_ptr<GraphStaging> graph, std::chrono::milliseconds limit)
    : Staging(graph->sharedStreams(), graph->stream(), limit), graph_(std::move(graph)) {
  cutInputs(graph_->cut());
}

Status ReplayStaging::fetch(Group& group) {
  failpoint("graph-rung");
  return graph_->fetchAfterLateCopies(group);
}

void ReplayStaging::giveBack() {
  Lock lock(mutex_);
  if (!std::exchange(isEnded_, true)) graph_->release();
}

void ReplayStaging::abandon() {
  Lock lock(mutex_);
  if (std::exchange(isEnded_, true)) return;
  graph_->restoreOutputs();
  graph_->release();
}

}  // namespace mooncake
