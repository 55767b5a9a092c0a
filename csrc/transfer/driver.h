#pragma once

#include <array>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "transfer/bell_pool.h"
#include "transfer/limiter.h"
#include "transfer/task_queue.h"

namespace mooncake::transfer {

// What all drivers of an engine share. Outlives them.
struct DriverContext {
  Engine& engine;
  Limiter& limiter;
  Errands& errands;     // asks peers who they are
  Interrupt& stopping;  // bumped when the engine closes
  Doorbell& ended;      // rung when a batch is over
  BellPool& bells;      // of drivers
  const std::string& logName;
};

// Carries out transfers on the thread that calls it: begins as many as may be under way, and waits
// for their ends. A transfer that fails because a connection broke is begun again when that stands
// again; one that was refused, because what we knew of the peer was old, once more with what the
// peer says now. Each ends once.
class Driver {
 public:
  static constexpr size_t kMostUnderWay = 64;

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
    Clock::time_point begun;
    Clock::time_point again;                  // kWaits: when it is begun again
    Clock::duration pause{};                  // before that
    std::shared_ptr<Segment::Asking> asking;  // kAsks: the peer anew
    std::string why;                          // kAsks: what had failed
  };

  bool fill();
  void begin(Flight& flight);
  Status place(Flight& flight);
  void flush();
  template <typename Request>
  void hand(std::span<Flight* const> flights, std::vector<Request>& requests);
  void copyHere(Flight& flight);
  bool collect();
  void onError(Flight& flight, const Error& error);
  void later(Flight& flight);
  void askAnew(Flight& flight, const Error& error);
  static bool hasNews(const Flight& flight);
  void end(Flight& flight, TaskState state, const std::string& why = {});
  void stop(Flight& flight, TaskState state, const char* why);
  void expire();
  Clock::time_point nextLook() const;

  const DriverContext& context_;
  TaskQueue& queue_;
  Doorbell& bell_;  // outlives the channels
  std::vector<std::unique_ptr<Flight>> flights_;
  std::vector<Flight*> due_;  // have their place, and are handed to their channels together
  std::vector<GetRequest> gets_;
  std::vector<WriteRequest> writes_;
  size_t busy_ = 0;
  uint32_t generation_;  // of `stopping`
};

}  // namespace mooncake::transfer
