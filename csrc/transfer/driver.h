#pragma once

#include <memory>
#include <vector>

#include "engine/engine.h"
#include "transfer/bell_pool.h"
#include "transfer/slot_pool.h"
#include "transfer/task_queue.h"

namespace mooncake::transfer {

// The parts of an engine that all its drivers share. Outlives the drivers.
struct DriverContext {
  Engine& engine;
  SlotPool& slots;
  Errands& errands;     // threads that ask peers for their registrations
  Interrupt& stopping;  // bumped once, when the engine closes
  uint32_t generation;  // of `stopping`, while the engine is open
  Doorbell& ended;      // rung when a transfer has ended
  BellPool& bells;      // one for each driver
  const std::string& logName;
};

// Carries out transfers on the calling thread: begins transfers that get a slot, and waits until
// they end. If a connection breaks, its transfers begin again once it is restored. If the peer
// refuses a transfer because our copy of its registrations is old, the peer is asked once and the
// transfer is tried again. Each transfer ends exactly once.
class Driver {
 public:
  Driver(const DriverContext& context, TaskQueue& queue);
  ~Driver();

  // Returns when the queue is empty and no transfer of this driver is under way.
  void run();
  // The thread that bumps `stopping` must ring this bell.
  Doorbell& bell() { return bell_; }

 private:
  struct Flight {
    explicit Flight(Doorbell* bell) : completion(bell) {}
    // kFree: unused; kDue: in due_; kUnderWay: given to the channel; kWaits: begins again at
    // `again`; kAsks: waits for refreshSoon().
    enum class Stage { kFree, kDue, kUnderWay, kWaits, kAsks };
    Stage stage = Stage::kFree;
    TaskQueue::Claim claim{};
    Segment::Place place;
    Completion completion;
    Clock::time_point begun;                  // when it got its slot
    Clock::time_point again;                  // kWaits: when it begins again
    Clock::duration pause{};                  // length of the next kWaits
    std::shared_ptr<Segment::Asking> asking;  // kAsks
    std::string why;                          // kAsks: the error that led to the question
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
  void stop(Flight& flight, const char* why);
  void expire();
  void look(Flight& flight, Clock::time_point now);
  void sweep();

  const DriverContext& context_;
  TaskQueue& queue_;
  Doorbell& bell_;  // outlives the channels
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<Flight*> free_;    // flights without a transfer
  std::vector<Flight*> flying_;  // all other flights; sweep() moves ended flights to free_
  bool hasEnded_ = false;        // a flight has ended since the last sweep()
  size_t counted_ = 0;           // flights that hold a slot of the pool
  Clock::time_point nextLook_;   // when expire() next looks at all flights
  std::vector<Flight*> due_;     // located; flush() gives them to their channels together
  std::vector<GetRequest> gets_;
  std::vector<WriteRequest> writes_;
};

}  // namespace mooncake::transfer
