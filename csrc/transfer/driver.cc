#include "transfer/driver.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <utility>

#include "base/backoff.h"
#include "base/log.h"
#include "engine/memory/program_memory.h"
#include "transfer/local_copy.h"

namespace mooncake::transfer {
namespace {

constexpr auto kFirstPause = std::chrono::milliseconds(1);
constexpr auto kMostPause = std::chrono::milliseconds(100);
constexpr auto kLook = std::chrono::milliseconds(100);
constexpr char kNotMapped[] =
    "its memory here is registered and not mapped: unregister memory before it is freed";

}  // namespace

Driver::Driver(const DriverContext& context, TaskQueue& queue)
    : context_(context),
      queue_(queue),
      bell_(context.bells.take()),
      nextLook_(Clock::now() + kLook) {}

Driver::~Driver() { context_.bells.give(bell_); }

void Driver::run() {
  for (;;) {
    fill();
    flush();
    sweep();
    if (flying_.empty() && queue_.isEmpty()) return;
    if (!collect()) await();
    expire();
    flush();
    sweep();
  }
}

// Claims and begins every task that gets a slot.
void Driver::fill() {
  std::optional<Clock::time_point> now;
  while (const auto claim = queue_.pop(context_.slots)) {
    if (!now) now = Clock::now();
    if (free_.empty())
      free_.push_back(flights_.emplace_back(std::make_unique<Flight>(&bell_)).get());
    Flight& flight = *free_.back();
    free_.pop_back();
    flying_.push_back(&flight);
    flight.claim = *claim;
    flight.pause = kFirstPause;
    flight.begun = *now;
    if (claim->slot == SlotPool::Slot::kCounted) {
      ++counted_;
      nextLook_ = std::min(nextLook_, *now + SlotPool::kPatience);
    }
    nextLook_ = std::min(nextLook_, claim->batch->deadline().when());
    claim->task->state.store(TaskState::kPending, std::memory_order_relaxed);
    begin(flight);
  }
}

// Moves flights that have ended to the free list.
void Driver::sweep() {
  if (!std::exchange(hasEnded_, false)) return;
  std::erase_if(flying_, [this](Flight* flight) {
    if (flight->stage != Flight::Stage::kFree) return false;
    free_.push_back(flight);
    return true;
  });
}

bool Driver::anyNews() const {
  return std::any_of(flying_.begin(), flying_.end(),
                     [](const Flight* flight) { return hasNews(*flight); });
}

// Blocks until a flight has news, or until nextLook_. A driver without a counted slot also wakes
// when other drivers end transfers or new tasks arrive, because its own transfers may all be with
// peers that do not answer.
void Driver::await() {
  std::optional<SlotPool::Rest> rest;
  if (counted_ == 0) {
    rest.emplace(context_.slots, bell_);
    const size_t before = flying_.size();
    fill();
    if (flying_.size() != before) return;
  }
  const Waiter waiter{bell_, context_.stopping, context_.generation, Deadline::at(nextLook_),
                      SpinPolicy::forMessages()};
  (void)waiter.until([&] { return (rest && rest->hasNews()) || anyNews(); });
}

void Driver::begin(Flight& flight) {
  if (context_.stopping.generation() != context_.generation)
    return end(flight, TaskState::kFailed, "the engine is closed");
  if (flight.claim.batch->deadline().passed())
    return end(flight, TaskState::kFailed, "its deadline has passed before it could begin");
  if (flight.claim.task->request.bytes == 0) return end(flight, TaskState::kCompleted);
  const Status placed = place(flight);
  if (!placed.ok()) return onError(flight, placed.error());
  if (!flight.place.peer) return copyHere(flight);
  flight.completion.reset();
  flight.stage = Flight::Stage::kDue;
  due_.push_back(&flight);
}

// Finds the peer and the region of the transfer's other end.
Status Driver::place(Flight& flight) {
  const TransferRequest& request = flight.claim.task->request;
  const uint32_t right = request.opcode == Opcode::kRead ? kRemoteRead : kRemoteWrite;
  auto place =
      request.segment->locate(request.remote, request.bytes, right, flight.claim.batch->deadline());
  if (!place.ok()) {
    flight.place = {.generation = request.segment->generation()};
    return place.error();
  }
  flight.place = std::move(*place);
  const auto& peer = flight.place.peer;
  if (peer && peer->disconnected) return {ErrorCode::kPeerLost, peer->evidence.detail};
  return {};
}

// Gives due flights to their channels, one call for each run with the same peer and direction.
// Small transfers thus share system calls.
void Driver::flush() {
  std::vector<Flight*> due;
  while (!due_.empty()) {  // a flight that cannot begin may become due again
    due.swap(due_);
    const auto kindOf = [](const Flight* flight) {
      return std::pair(flight->place.peer.get(), flight->claim.task->request.opcode);
    };
    for (size_t first = 0, next = 0; first < due.size(); first = next) {
      while (next < due.size() && kindOf(due[next]) == kindOf(due[first])) ++next;
      const std::span<Flight* const> alike(due.data() + first, next - first);
      if (kindOf(due[first]).second == Opcode::kRead) {
        hand(alike, gets_);
      } else {
        hand(alike, writes_);
      }
    }
    due.clear();
  }
}

template <typename Request>
void Driver::hand(std::span<Flight* const> flights, std::vector<Request>& requests) {
  requests.clear();
  for (Flight* flight : flights) {
    flight->stage = Flight::Stage::kUnderWay;
    const TransferRequest& asked = flight->claim.task->request;
    auto* local = reinterpret_cast<std::byte*>(asked.local);
    requests.push_back({flight->place.region,
                        flight->place.offset,
                        {local, asked.bytes},
                        &flight->completion,
                        !flight->claim.task->memory->isOurs,
                        flight->claim.task->memory->owner});
  }
  const std::shared_ptr<Peer> peer = flights.front()->place.peer;
  Channel& channel = *peer->channel;
  Status begun;
  if constexpr (std::is_same_v<Request, GetRequest>) {
    begun = channel.get(std::span<const Request>(requests));
  } else {
    begun = channel.write(std::span<const Request>(requests));
  }
  if (begun.ok()) return;
  for (Flight* flight : flights) onError(*flight, begun.error());
}

// Copies within this process: both ends are our own registered memory.
void Driver::copyHere(Flight& flight) {
  const TransferRequest& request = flight.claim.task->request;
  const bool isRead = request.opcode == Opcode::kRead;
  const auto use =
      context_.engine.regions().open(flight.place.region.key, flight.place.offset, request.bytes,
                                     isRead ? kRemoteRead : kRemoteWrite);
  if (!use) return end(flight, TaskState::kFailed, "the memory is not registered any more");
  const LocalMemory local{reinterpret_cast<std::byte*>(request.local),
                          flight.claim.task->memory->owner};
  const LocalMemory remote{use.data(), use.owner()};
  const Status copied =
      isRead ? copyLocal(local, remote, request.bytes) : copyLocal(remote, local, request.bytes);
  if (!copied.ok()) return end(flight, TaskState::kFailed, copied.error().message);
  end(flight, TaskState::kCompleted);
}

bool Driver::hasNews(const Flight& flight) {
  if (flight.stage == Flight::Stage::kAsks) return flight.asking->isDone();
  return flight.stage == Flight::Stage::kUnderWay && flight.completion.finished();
}

// Handles every flight with news. Returns whether there was any.
bool Driver::collect() {
  std::optional<Clock::time_point> now;
  for (Flight* flight : flying_) {
    if (!hasNews(*flight)) continue;
    if (!now) now = Clock::now();
    if (flight->stage == Flight::Stage::kAsks) {
      const Status answer = std::exchange(flight->asking, nullptr)->answer();
      if (answer.ok()) {
        begin(*flight);
      } else {
        end(*flight, TaskState::kFailed, flight->why + "; " + answer.error().message);
      }
      continue;
    }
    const ErrorCode code = flight->completion.error.load(std::memory_order_acquire);
    if (code == ErrorCode::kOk) {
      context_.slots.succeeded(flight->claim.task->request.segment->slots(), *now);
      end(*flight, TaskState::kCompleted);
    } else {
      const std::string& cause = flight->completion.why;
      onError(*flight, {code, !cause.empty() ? cause
                              : code == ErrorCode::kInvalidArgument
                                  ? kNotMapped
                                  : std::string("the transfer ended with ") + errorCodeName(code)});
    }
  }
  return now.has_value();
}

void Driver::onError(Flight& flight, const Error& error) {
  Task& task = *flight.claim.task;
  Segment& segment = *task.request.segment;
  const auto& peer = flight.place.peer;
  switch (error.code) {
    case ErrorCode::kPeerLost:
      // The peer's process lives and its connection is being restored, or the process is gone.
      if (peer && !peer->disconnected) return later(flight);
      [[fallthrough]];
    case ErrorCode::kAborted:
    case ErrorCode::kRefused: {
      if (segment.isOurs() || std::exchange(task.hasRefreshed, true)) break;
      return askAnew(flight, error);
    }
    case ErrorCode::kExhausted:
      return later(flight);
    default:
      break;
  }
  end(flight, TaskState::kFailed, error.message);
}

// Asks on another thread: the answer may take long, and this driver's other transfers must not wait
// for it.
void Driver::askAnew(Flight& flight, const Error& error) {
  flight.stage = Flight::Stage::kAsks;
  flight.why = error.message;
  flight.asking = flight.claim.task->request.segment->refreshSoon(
      flight.place.generation, flight.claim.batch->deadline(), context_.errands, bell_);
}

void Driver::later(Flight& flight) {
  flight.stage = Flight::Stage::kWaits;
  flight.again = Clock::now() + jittered(flight.pause);
  flight.pause = doubled(flight.pause, kMostPause);
  nextLook_ = std::min(nextLook_, flight.again);
}

// Logs one line for each batch, however many of its transfers fail.
void Driver::end(Flight& flight, TaskState state, const std::string& why) {
  const auto [batch, task, slot] = flight.claim;
  Segment& segment = *task->request.segment;
  if (state != TaskState::kCompleted && batch->failed.fetch_add(1) == 0) {
    log(LogLevel::kWarning, context_.logName,
        task->request.opcode == Opcode::kRead ? "a read from " : "a write to ", '"', segment.name(),
        "\" (", task->request.bytes, " bytes) failed: ", why);
  }
  if (state == TaskState::kCompleted) {
    Engine& engine = context_.engine;
    const uint64_t bytes = task->request.bytes;
    task->request.opcode == Opcode::kRead ? engine.countRead(bytes) : engine.countWritten(bytes);
  }
  if (slot == SlotPool::Slot::kCounted) --counted_;
  context_.slots.give(segment.slots(), slot);
  task->memory.reset();
  flight.place = {};
  flight.asking.reset();
  flight.stage = Flight::Stage::kFree;
  hasEnded_ = true;
  task->state.store(state, std::memory_order_release);
  batch->ended.fetch_add(1, std::memory_order_seq_cst);  // the batch may be gone from here on
  context_.ended.ring();
}

void Driver::stop(Flight& flight, const char* why) {
  if (flight.stage == Flight::Stage::kUnderWay) {
    flight.place.peer->channel->cancel(&flight.completion);
    // No error means success only if the completion has finished.
    const Completion& completion = flight.completion;
    if (completion.finished() && completion.error == ErrorCode::kOk)
      return end(flight, TaskState::kCompleted);
  }
  if (flight.stage == Flight::Stage::kDue) std::erase(due_, &flight);
  end(flight, TaskState::kFailed, why);
}

// Checks the deadline, slot and pause of every flight once the earliest of them is reached, or when
// the engine closes.
void Driver::expire() {
  const bool isStopping = context_.stopping.generation() != context_.generation;
  const auto now = Clock::now();
  if (!isStopping && now < nextLook_) return;
  nextLook_ = now + kLook;
  for (Flight* flight : flying_) {
    if (flight->stage == Flight::Stage::kFree) continue;
    if (isStopping) {
      stop(*flight, "the engine was closed");
    } else {
      look(*flight, now);
    }
  }
}

void Driver::look(Flight& flight, Clock::time_point now) {
  const auto deadline = flight.claim.batch->deadline().when();
  if (deadline <= now) return stop(flight, "no answer within its deadline");
  nextLook_ = std::min(nextLook_, deadline);
  if (flight.claim.slot == SlotPool::Slot::kCounted) {
    if (flight.begun + SlotPool::kPatience <= now) {
      context_.slots.giveBack(flight.claim.task->request.segment->slots(), flight.claim.slot, now);
      --counted_;
    } else {
      nextLook_ = std::min(nextLook_, flight.begun + SlotPool::kPatience);
    }
  }
  if (flight.stage != Flight::Stage::kWaits) return;
  if (flight.again <= now) return begin(flight);
  nextLook_ = std::min(nextLook_, flight.again);
}

}  // namespace mooncake::transfer
