#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "transfer/bell_pool.h"
#include "transfer/slot_pool.h"
#include "transfer/task_queue.h"

namespace mooncake::transfer {

// What all drivers of an engine share. Outlives them.
struct DriverContext {
  Engine& engine;
  SlotPool& slots;
  Errands& errands;     // asks peers who they are
  Interrupt& stopping;  // bumped when the engine closes, once
  uint32_t generation;  // of `stopping`, before that
  Doorbell& ended;      // rung when a batch is over
  BellPool& bells;      // of drivers
  const std::string& logName;
};

// Carries out transfers on the thread that calls it: begins those that get a slot, and waits for
// their ends. A transfer that fails because a connection broke is begun again when that stands
// again; one that was refused, because what we knew of the peer was old, once more with what the
// peer says now. Each ends once.
class Driver {
 public:
  Driver(const DriverContext& context, TaskQueue& queue);
  ~Driver();

  // Until the queue has nothing more to give and nothing is under way here.
  void run();
  // Whoever bumps `stopping` rings it.
  Doorbell& bell() { return bell_; }

 private:
  struct Flight {
    explicit Flight(Doorbell* bell) : completion(bell) {}
    enum class Stage { kFree, kDue, kUnderWay, kWaits, kAsks };
    Stage stage = Stage::kFree;
    TaskQueue::Claim claim{};
    Segment::Place place;
    Completion completion;
    Clock::time_point begun;                  // when it got its slot
    Clock::time_point again;                  // kWaits: when it is begun again
    Clock::duration pause{};                  // before that
    std::shared_ptr<Segment::Asking> asking;  // kAsks: the peer anew
    std::string why;                          // kAsks: what had failed
  };

  void fill();
  void begin(Flight& flight);
  Status place(Flight& flight);
  void flush();
  template <typename Request>
  void hand(std::span<Flight* const> flights, std::vector<Request>& requests);
  void copyHere(Flight& flight);
  bool collect();
  bool anyNews() const;
  void await();
  void onError(Flight& flight, const Error& error);
  void later(Flight& flight);
  void askAnew(Flight& flight, const Error& error);
  static bool hasNews(const Flight& flight);
  void end(Flight& flight, TaskState state, const std::string& why = {});
  void stop(Flight& flight, TaskState state, const char* why);
  void expire();
  void look(Flight& flight, Clock::time_point now);
  void sweep();

  const DriverContext& context_;
  TaskQueue& queue_;
  Doorbell& bell_;  // outlives the channels
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<Flight*> free_;    // of them
  std::vector<Flight*> flying_;  // the others; sweep() moves those that have ended
  bool hasEnded_ = false;        // a flight, since the last sweep()
  size_t counted_ = 0;           // flights in slots of the pool
  Clock::time_point nextLook_;   // when a flight is due to be begun again, parked or timed out
  std::vector<Flight*> due_;     // have their place, and are handed to their channels together
  std::vector<GetRequest> gets_;
  std::vector<WriteRequest> writes_;
};

}  // namespace mooncake::transfer
