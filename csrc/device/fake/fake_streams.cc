#include "device/fake/fake_streams.h"

#include <algorithm>
#include <string>

namespace mooncake {
namespace {

Error refused(std::string cause) { return {ErrorCode::kInvalidArgument, std::move(cause)}; }

}  // namespace

FakeStreams::FakeStreams(int devices, size_t queues) : queues_(size_t(devices)) {
  for (int device = 0; device < devices; ++device) {
    for (size_t i = 0; i < queues; ++i)
      queues_[size_t(device)].all.push_back(std::make_shared<FakeQueue>());
    const DeviceStream first{.device = device, .handle = nullptr};
    lanes_[{device, nullptr}].stream = std::make_shared<FakeStream>(first, nextQueue(device));
  }
}

std::shared_ptr<FakeQueue> FakeStreams::nextQueue(int device) {
  auto& [all, next] = queues_[size_t(device)];
  return all.empty() ? nullptr : all[next++ % all.size()];
}

FakeStreams::~FakeStreams() {
  halt();
  join(Deadline::at(Clock::time_point::max()));
}

Result<FakeStreams::Lane*> FakeStreams::find(DeviceStream id) {
  const auto found = lanes_.find({id.device, id.handle});
  if (found != lanes_.end()) return &found->second;
  return refused("device " + std::to_string(id.device) + " has no stream " +
                 std::to_string(reinterpret_cast<uintptr_t>(id.handle)) +
                 "; it may have been destroyed");
}

bool FakeStreams::isOn(const std::shared_ptr<FakeCapture>& capture) const {
  return std::ranges::any_of(lanes_,
                             [&](const auto& entry) { return entry.second.capture == capture; });
}

FakeStreams::Graph FakeStreams::finish(const std::shared_ptr<FakeCapture>& capture) {
  for (auto& [key, lane] : lanes_) {
    if (lane.capture == capture) lane.capture = nullptr;
  }
  return capture->takeNodes();
}

DeviceStream FakeStreams::create(int device) {
  Lock lock(mutex_);
  std::erase_if(closing_, [](const auto& stream) { return stream->hasEnded(); });
  const DeviceStream made{.device = device, .handle = reinterpret_cast<void*>(++lastStream_)};
  lanes_[{device, made.handle}].stream = std::make_shared<FakeStream>(made, nextQueue(device));
  return made;
}

bool FakeStreams::destroy(DeviceStream id) {
  Graph dropped;  // goes after the lock
  Lock lock(mutex_);
  const auto found = lanes_.find({id.device, id.handle});
  if (found == lanes_.end() || id.handle == nullptr) return false;
  Lane& lane = found->second;
  if (const auto capture = lane.capture) {
    capture->spoil(lane.stream->name() + " was destroyed");
    if (capture->beganOn(*lane.stream)) dropped = finish(capture);
  }
  lane.stream->close();
  closing_.push_back(std::move(lane.stream));
  lanes_.erase(found);
  return true;
}

std::vector<DeviceStream> FakeStreams::list(int device) {
  std::vector<DeviceStream> found;
  Lock lock(mutex_);
  for (const auto& [key, lane] : lanes_) {
    if (key.first == device) found.push_back(lane.stream->id());
  }
  return found;
}

bool FakeStreams::isIdle(DeviceStream id) {
  Lock lock(mutex_);
  const auto lane = find(id);
  return !lane.ok() || (*lane)->stream->isIdle();
}

Status FakeStreams::add(DeviceStream id, FakeStream::Task&& task) {
  Lock lock(mutex_);
  const auto lane = find(id);
  if (!lane.ok()) return lane.error();
  if (!(*lane)->capture) return (*lane)->stream->enqueue(std::move(task));
  (*lane)->capture->add(*(*lane)->stream, [task = std::move(task)] { return task; });
  return {};
}

Status FakeStreams::addNode(DeviceStream id, FakeCapture::Node node) {
  Lock lock(mutex_);
  const auto lane = find(id);
  if (!lane.ok()) return lane.error();
  if (!(*lane)->capture) return refused("no capture of " + (*lane)->stream->name() + " is on");
  (*lane)->capture->add(*(*lane)->stream, std::move(node));
  return {};
}

Status FakeStreams::synchronize(DeviceStream id) {
  std::shared_ptr<FakeStream> stream;
  {
    Lock lock(mutex_);
    const auto lane = find(id);
    if (!lane.ok()) return lane.error();
    MOONCAKE_TRY(checkWait(**lane));
    stream = (*lane)->stream;
  }
  return stream->synchronize();
}

Status FakeStreams::synchronizeDevice(int device) {
  std::vector<std::shared_ptr<FakeStream>> all;
  {
    Lock lock(mutex_);
    for (const auto& [key, lane] : lanes_) {
      if (key.first != device) continue;
      MOONCAKE_TRY(checkWait(lane));
      all.push_back(lane.stream);
    }
  }
  for (const auto& stream : all) MOONCAKE_TRY(stream->synchronize());
  return {};
}

Status FakeStreams::checkWait(const Lane& lane) {
  if (!lane.capture) return {};
  lane.capture->spoil("the host was to wait for " + lane.stream->name());
  return refused("a capture is on, so the work of " + lane.stream->name() + " does not run");
}

Result<std::shared_ptr<FakeMark>> FakeStreams::mark(DeviceStream id) {
  Lock lock(mutex_);
  const auto lane = find(id);
  if (!lane.ok()) return lane.error();
  if (const auto& capture = (*lane)->capture)
    return std::make_shared<FakeMark>(capture, capture->placeOf(*(*lane)->stream));
  auto mark = std::make_shared<FakeMark>();
  MOONCAKE_TRY((*lane)->stream->enqueue(FakeMark::recordTask(mark)));
  return mark;
}

Status FakeStreams::await(DeviceStream id, const std::shared_ptr<FakeMark>& mark) {
  Lock lock(mutex_);
  const auto found = find(id);
  if (!found.ok()) return found.error();
  Lane& lane = **found;
  const auto& recorded = mark->capture();
  if (!recorded && !lane.capture) return lane.stream->enqueue(FakeMark::waitTask(mark));
  if (!recorded) {
    lane.capture->spoil(lane.stream->name() + " was to wait for work outside of the capture");
    return refused("the event was recorded outside of the capture of " + lane.stream->name());
  }
  if (lane.capture && lane.capture != recorded) {
    lane.capture->spoil(lane.stream->name() + " was to wait for another capture");
    return refused("the event belongs to another capture than " + lane.stream->name());
  }
  if (!isOn(recorded)) return refused("the event was recorded in a capture that is over");
  lane.capture = recorded;
  recorded->join(*lane.stream, mark->place());
  return {};
}

void FakeStreams::retain(const std::shared_ptr<void>& object) {
  Lock lock(mutex_);
  for (auto& [key, lane] : lanes_) lane.stream->retain(object);
  for (auto& stream : closing_) stream->retain(object);
}

bool FakeStreams::spoilCaptures(const std::string& call) {
  bool isAny = false;
  Lock lock(mutex_);
  for (auto& [key, lane] : lanes_) {
    if (!lane.capture) continue;
    isAny = true;
    lane.capture->spoil("another thread called " + call);
  }
  return isAny;
}

Result<bool> FakeStreams::isCapturing(DeviceStream id) {
  Lock lock(mutex_);
  const auto lane = find(id);
  if (!lane.ok()) return lane.error();
  return (*lane)->capture != nullptr;
}

Status FakeStreams::beginCapture(DeviceStream id) {
  Lock lock(mutex_);
  const auto lane = find(id);
  if (!lane.ok()) return lane.error();
  const FakeStream& origin = *(*lane)->stream;
  if ((*lane)->capture) return refused("a capture of " + origin.name() + " is on");
  (*lane)->capture = std::make_shared<FakeCapture>(origin);
  return {};
}

Result<uint64_t> FakeStreams::endCapture(DeviceStream id) {
  Graph nodes;  // if they are dropped, they go after the lock
  Lock lock(mutex_);
  const auto lane = find(id);
  if (!lane.ok()) return lane.error();
  const auto capture = (*lane)->capture;
  if (!capture || !capture->beganOn(*(*lane)->stream))
    return refused("no capture began on " + (*lane)->stream->name());
  nodes = finish(capture);
  MOONCAKE_TRY(capture->check());
  graphs_.push_back(std::make_shared<const Graph>(std::move(nodes)));
  return graphs_.size() - 1;
}

Status FakeStreams::replay(uint64_t graph, DeviceStream id) {
  std::shared_ptr<const Graph> nodes;
  {
    Lock lock(mutex_);
    if (graph >= graphs_.size()) return refused("there is no graph " + std::to_string(graph));
    nodes = graphs_[graph];
  }
  std::vector<FakeStream::Task> tasks;  // nodes may have locks under which other threads come here
  for (const FakeCapture::Node& node : *nodes) tasks.push_back(node());
  Lock lock(mutex_);
  const auto lane = find(id);
  if (!lane.ok()) return lane.error();
  if ((*lane)->capture) return refused("a capture of " + (*lane)->stream->name() + " is on");
  for (FakeStream::Task& task : tasks) MOONCAKE_TRY((*lane)->stream->enqueue(std::move(task)));
  return {};
}

void FakeStreams::halt() {
  Lock lock(mutex_);
  // No stream goes on because another one of its queue has been halted.
  for (auto& [key, lane] : lanes_) lane.stream->stop();
  for (auto& stream : closing_) stream->stop();
  for (auto& [key, lane] : lanes_) lane.stream->halt();
  for (auto& stream : closing_) stream->halt();
}

void FakeStreams::join(Deadline deadline) {
  std::vector<std::shared_ptr<FakeStream>> all;
  {
    Lock lock(mutex_);
    for (auto& [key, lane] : lanes_) all.push_back(lane.stream);
    all.insert(all.end(), closing_.begin(), closing_.end());
  }
  for (auto& stream : all) stream->join(deadline);
}

}  // namespace mooncake
