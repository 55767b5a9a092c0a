#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>

#include <c10/core/Stream.h>

namespace fake_device {

// Holds a stream until a test opens it. Opens itself when it is destroyed. Thread-safe.
class Gate {
 public:
  explicit Gate(const c10::Stream& stream);
  ~Gate();
  void open();

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable opened;
    bool isOpen = false;
  };
  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace fake_device
