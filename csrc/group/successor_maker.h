#pragma once

#include <functional>
#include <memory>
#include <thread>

#include "base/result.h"
#include "base/stop_signal.h"

namespace mooncake {

// A thread that makes the successor of a series, beside the operations of the series. One per
// successor: in one thread, two that members make in different orders would wait for each other.
class SuccessorMaker {
 public:
  // `make` returns soon once the signal is set.
  static Result<std::shared_ptr<SuccessorMaker>> start(
      std::function<void(const StopSignal& stop)> make);
  // Sets the signal, and waits for the thread.
  ~SuccessorMaker();
  SuccessorMaker(const SuccessorMaker&) = delete;
  SuccessorMaker& operator=(const SuccessorMaker&) = delete;

 private:
  explicit SuccessorMaker(std::unique_ptr<StopSignal> stop) : stop_(std::move(stop)) {}

  const std::unique_ptr<StopSignal> stop_;
  std::thread thread_;
};

}  // namespace mooncake
