#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/result.h"

namespace mooncake {

// Runs calls to a store, one after the other, on a thread of their own ("mooncake-store"). A call
// to a TCPStore has no timeout: while the server's process is stopped, it waits in recv() for ever.
// The caller must end at its deadline all the same, and leaves such a call behind. For one caller.
class StoreCalls {
 public:
  // `until`: when the caller must end. Calls that begin later may take a second.
  explicit StoreCalls(Deadline until) : until_(until) {}
  // Joins the thread. Detaches it instead where a call is still under way: the thread then ends
  // with that call, or with the process.
  ~StoreCalls();
  StoreCalls(const StoreCalls&) = delete;
  StoreCalls& operator=(const StoreCalls&) = delete;

  // Returns what `call` returned. kTimeout when it has not run by `until`; kExhausted when there is
  // no thread. `call` must own all that it uses, as it may run on after the return. It must not
  // throw.
  template <typename Call>
  auto run(Call call) -> decltype(call()) {
    const auto answer = std::make_shared<std::optional<decltype(call())>>();
    const auto task = [answer, call = std::move(call)] { answer->emplace(call()); };
    if (const Status ran = runTask(task); !ran.ok()) return ran.error();
    return std::move(**answer);
  }

  // How long the call under way has been there; zero when there is none.
  Clock::duration silence() const;

 private:
  struct State;

  Status runTask(std::function<void()> task);
  Status start();

  const Deadline until_;
  std::shared_ptr<State> state_;  // null until the first call
  std::thread thread_;
};

}  // namespace mooncake
